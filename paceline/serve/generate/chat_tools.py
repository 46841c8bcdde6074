"""The answer of a chat that may call tools, in OpenAI's shape: thoughts, content and calls apart, arguments as they
come."""

from collections.abc import Sequence
from typing import Any

from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.deltas import Delta
from paceline.serve.generate.formats import ChatFormat
from paceline.serve.tools.events import Arguments, CallBegin, Content, Event, joined
from paceline.serve.tools.parsers import Parser, feed, finish
from paceline.serve.tools.plan import ToolPlan


class ToolReader:
    """The events of one choice."""

    def __init__(self, plan: ToolPlan) -> None:
        self._parser: Parser = plan.parser()

    def read(self, delta: Delta) -> list[Event]:
        events = feed(self._parser, delta.text)
        if delta.finish_reason is not None:
            events += finish(self._parser, cut_off=delta.finish_reason == "length")
        return joined(events)

    def finish_reason(self, delta: Delta) -> str | None:
        called = self._parser.out.num_calls > 0
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason


class ChatToolsFormat:
    object, chunk_object = ChatFormat.object, ChatFormat.chunk_object

    def __init__(self, tokenizer: Tokenizer, plan: ToolPlan) -> None:
        self._plain = ChatFormat(tokenizer)
        self._plan = plan
        self._readers: dict[int, ToolReader] = {}  # by choice

    def choices(self, delta: Delta, *, whole: bool) -> list[dict[str, Any]]:
        if delta.first:
            self._readers[delta.index] = ToolReader(self._plan)
        reader = self._readers[delta.index]
        events = reader.read(delta)
        body = self._plain.choice(delta, whole=whole) | {"finish_reason": reader.finish_reason(delta)}
        if whole:
            return [body | {"message": self._message(events, delta.reasoning)}]
        return self._chunks(body, self._pieces(events, delta), delta)

    def _message(self, events: Sequence[Event], reasoning: str | None) -> dict[str, Any]:
        content = "".join(event.text for event in events if isinstance(event, Content))
        calls = [self._call(event) for event in events if isinstance(event, CallBegin)]
        for event in events:
            if isinstance(event, Arguments):
                calls[event.index]["function"]["arguments"] += event.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning is not None:
            message |= {"reasoning": reasoning or None, "content": content or None}
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    def _pieces(self, events: Sequence[Event], delta: Delta) -> list[dict[str, Any]]:
        thoughts = [{"reasoning": delta.reasoning}] if delta.reasoning else []
        pieces = thoughts + [self._piece(event) for event in events]
        if delta.first:
            role = {"role": "assistant", "content": None}  # a call may be all that comes
            pieces[:1] = [role | pieces[0]] if pieces else [role]
        return pieces

    def _piece(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, CallBegin):
            return {"tool_calls": [{"index": event.index, **self._call(event)}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _call(self, event: CallBegin) -> dict[str, Any]:
        function = {"name": event.name, "arguments": ""}
        return {"id": self._plan.format.family.new_id(), "type": "function", "function": function}

    def _chunks(self, body: dict[str, Any], pieces: list[dict[str, Any]], delta: Delta) -> list[dict[str, Any]]:
        """One for each piece. The first has what is told of tokens, the last the finish reason, and no piece."""
        tells_tokens = delta.logprobs is not None or delta.pieces is not None
        if delta.finish_reason is not None or (not pieces and tells_tokens):
            pieces.append({})
        chunks = [body | {"delta": piece, "logprobs": None, "finish_reason": None} for piece in pieces]
        if chunks:
            chunks[0]["logprobs"] = body["logprobs"]
            chunks[-1]["finish_reason"] = body["finish_reason"]
        return chunks
