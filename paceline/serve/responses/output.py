"""The output of a response as it grows: its items, and the events by which a client follows them.

message         output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
                output_item.done
function call   output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from paceline.serve.tools.events import CallBegin, Content, Event

Item = dict[str, Any]
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class Output:
    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.items: list[Item] = []
        self._new_call_id = new_call_id
        self._open = False  # the last item is not finished
        self._texts: list[str] = []  # of the open item: its text or arguments
        self._events: list[dict[str, Any]] = []

    def add(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """What a client is told of them."""
        for event in events:
            if isinstance(event, Content):
                self._text(event.text)
            elif isinstance(event, CallBegin):
                self._begin_call(event.name)
            else:
                self._texts.append(event.text)
                self._tell("response.function_call_arguments.delta", delta=event.text)
        return self._take()

    def finish(self, status: str) -> list[dict[str, Any]]:
        if not self.items:
            self._begin_message()
        self._close(status)
        return self._take()

    def _text(self, text: str) -> None:
        if not self._open or self.items[-1]["type"] != "message":
            self._begin_message()
        self._texts.append(text)
        self._tell("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _begin_message(self) -> None:
        self._begin({"id": _id("msg"), "type": "message", "role": "assistant", "status": IN_PROGRESS, "content": []})
        self._tell("response.content_part.added", content_index=0, part=_part(""))

    def _begin_call(self, name: str) -> None:
        call = {"call_id": self._new_call_id(), "name": name, "arguments": ""}
        self._begin({"id": _id("fc"), "type": "function_call", "status": IN_PROGRESS, **call})

    def _begin(self, item: Item) -> None:
        self._close(COMPLETED)
        self.items.append(item)
        self._open = True
        self._tell_item("response.output_item.added")

    def _close(self, status: str) -> None:
        if not self._open:
            return
        text, item = "".join(self._texts), self.items[-1]
        self._texts.clear()
        item["status"] = status
        if item["type"] == "message":
            item["content"] = [_part(text)]
            self._tell("response.output_text.done", content_index=0, text=text, logprobs=[])
            self._tell("response.content_part.done", content_index=0, part=_part(text))
        else:
            item["arguments"] = text
            self._tell("response.function_call_arguments.done", name=item["name"], arguments=text)
        self._tell_item("response.output_item.done")
        self._open = False

    def _tell(self, type: str, **fields: Any) -> None:
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        self._events.append({"type": type, **at, **fields})

    def _tell_item(self, type: str) -> None:
        self._events.append({"type": type, "output_index": len(self.items) - 1, "item": dict(self.items[-1])})

    def _take(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
