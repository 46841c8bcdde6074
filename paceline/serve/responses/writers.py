"""A response on its way to the client: as one body, or as events that say what became of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

from paceline.core.outputs import RequestOutput
from paceline.llm.worker import in_worker
from paceline.serve.generate.answer import Stream, Whole
from paceline.serve.generate.call import Call
from paceline.serve.generate.chat_tools import ToolReader
from paceline.serve.generate.deltas import Cursor, Delta, cursors_for
from paceline.serve.generate.event_sender import EventSender
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.http.errors import ApiError
from paceline.serve.http.message_bodies import Message
from paceline.serve.responses.body import response_body
from paceline.serve.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Output
from paceline.serve.responses.request import FunctionCallItem, InputItem, MessageItem, ResponsesRequest
from paceline.serve.responses.translate import messages_of, own_name
from paceline.serve.tools.events import Content, Event

# Takes a finished response and the messages of its answer.
Keep = Callable[[dict[str, Any], Sequence[Message]], None]


@dataclass(frozen=True, slots=True)
class Responses:
    """The shape of this route's answers. `keep`: where finished ones go."""

    asked: ResponsesRequest
    keep: Keep

    def call_id(self, request_id: str) -> str:
        return f"resp_{request_id}"

    def own_error(self, error: Exception) -> Exception:
        return own_name(error) if isinstance(error, ApiError) else error

    def whole(self, call: Call, backend: ServedEngine) -> Whole:
        return WholeResponse(Progress(call, self, backend))

    def stream(self, call: Call, backend: ServedEngine, send: Send) -> Stream:
        return ResponseStream(Progress(call, self, backend), send)


class Progress:
    """What is there of one response."""

    def __init__(self, call: Call, shape: Responses, backend: ServedEngine) -> None:
        self.call = call
        self._shape = shape
        self._cursors: list[Cursor] = cursors_for(call, backend)
        self._reader = None if call.plan is None else ToolReader(call.plan)
        self._output = Output(_no_calls if call.plan is None else call.plan.format.family.new_id)
        self._status = COMPLETED

    def take(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The events of a delta."""
        (cursor,) = self._cursors
        deltas = [delta for new in output.outputs if (delta := cursor.advance(new))]
        return [event for delta in deltas for event in self._told(delta)]

    def finished(self) -> dict[str, Any]:
        body = self.body(self._status, self._cursors)
        self._shape.keep(body, messages_of([_as_input(item) for item in self._output.items]))
        return body

    def body(self, status: str, cursors: Sequence[Cursor] = (), error: dict[str, Any] | None = None) -> dict[str, Any]:
        return response_body(self.call, self._shape.asked, status, self._output.items, cursors, error)

    def _told(self, delta: Delta) -> list[dict[str, Any]]:
        text: list[Event] = [Content(delta.text)] if delta.text else []
        events = text if self._reader is None else self._reader.read(delta)
        told = self._output.add(events)
        if delta.finish_reason is not None:
            self._status = INCOMPLETE if delta.finish_reason == "length" else COMPLETED
            told += self._output.finish(self._status)
        return told


class WholeResponse:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    async def take(self, prompt: int, output: RequestOutput) -> None:
        self._progress.take(output)

    async def body(self) -> bytes:
        return json.dumps(self._progress.finished(), ensure_ascii=False, allow_nan=False).encode()


class ResponseStream:
    def __init__(self, progress: Progress, send: Send) -> None:
        self._progress = progress
        self._sender = EventSender(send, progress.call.id)
        self._num_events = 0

    @property
    def started(self) -> bool:
        return self._sender.started

    async def take(self, prompt: int, output: RequestOutput) -> None:
        num_tokens = sum(len(new.token_ids) for new in output.outputs)
        text = await in_worker(self._progress.call.num_entries(num_tokens, 0), lambda: self._texts(output))
        if text:
            await self._sender.write(text)

    async def end(self) -> None:
        body = self._progress.finished()
        await self._sender.write(self._event({"type": f"response.{body['status']}", "response": body}))
        await self._sender.end()

    async def fail(self, error: Exception) -> None:
        answer = self._sender.failure(error)
        code = "server_error" if answer.status >= 500 else "invalid_prompt"  # of those that OpenAI's clients know
        body = self._progress.body("failed", error={"code": code, "message": str(answer)})
        await self._sender.say_last(self._event({"type": "response.failed", "response": body}))

    def _texts(self, output: RequestOutput) -> str:
        begin = [] if self._num_events else self._begin()
        return "".join(map(self._event, [*begin, *self._progress.take(output)]))

    def _begin(self) -> list[dict[str, Any]]:
        body = self._progress.body(IN_PROGRESS)
        return [{"type": f"response.{what}", "response": body} for what in ("created", "in_progress")]

    def _event(self, event: dict[str, Any]) -> str:
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return f"event: {event['type']}\ndata: {json.dumps(numbered, separators=(',', ':'))}\n\n"


def _as_input(item: dict[str, Any]) -> InputItem:
    """An item of the answer as it comes back in the next request."""
    kind = MessageItem if item["type"] == "message" else FunctionCallItem
    return kind.model_validate(item)


def _no_calls() -> str:
    raise AssertionError("a call was found in an answer without tools")
