"""A call's answer as server-sent events: one chunk per delta and choice, then the figures, then [DONE]."""

import json
from functools import partial
from typing import Any

from starlette.types import Send

from paceline.core.outputs import RequestOutput
from paceline.llm.worker import in_worker
from paceline.serve.generate.call import Call
from paceline.serve.generate.deltas import Delta, cursors_for
from paceline.serve.generate.event_sender import EventSender
from paceline.serve.generate.figures import speculation, usage
from paceline.serve.generate.formats import choice_bodies, format_for
from paceline.serve.generate.served_engine import ServedEngine


class EventStream:
    def __init__(self, call: Call, backend: ServedEngine, send: Send) -> None:
        self._call = call
        self._sender = EventSender(send, call.id)
        self._shape = format_for(call, backend.tokenizer)
        self._cursors = cursors_for(call, backend)
        head = {"id": call.id, "object": self._shape.chunk_object, "created": call.created, "model": call.model}
        self._head = "data: " + json.dumps(head, separators=(",", ":"))[:-1]  # open: choices follow
        options = call.body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    @property
    def started(self) -> bool:
        return self._sender.started

    async def take(self, prompt: int, output: RequestOutput) -> None:
        text = await in_worker(self._num_entries(prompt, output), partial(self._chunks, prompt, output))
        if text:
            await self._sender.write(text)

    async def end(self) -> None:
        await self._sender.write(self._last_chunk() + "data: [DONE]\n\n")
        await self._sender.end()

    async def fail(self, error: Exception) -> None:
        """Tell a client that already has a part of its answer."""
        answer = self._sender.failure(error)
        await self._sender.say_last(f"data: {json.dumps(answer.body())}\n\ndata: [DONE]\n\n")

    def _num_entries(self, prompt: int, output: RequestOutput) -> int:
        """A prompt is written with the first chunk of each of its choices."""
        call = self._call
        num_first = sum(self._cursors[prompt * call.params.n + new.index].first for new in output.outputs)
        num_tokens = sum(len(new.token_ids) for new in output.outputs)
        return call.num_entries(num_tokens, num_first * len(call.prompts[prompt]))

    def _chunks(self, prompt: int, output: RequestOutput) -> str:
        cursors = self._cursors[prompt * self._call.params.n :]
        deltas = [delta for new in output.outputs if (delta := cursors[new.index].advance(new))]
        return "".join(map(self._chunk, deltas))

    def _chunk(self, delta: Delta) -> str:
        counts = f',"usage":{json.dumps(usage(self._call, self._cursors))}' if self._usage_always else ""
        choices = choice_bodies(self._shape, delta, whole=False)
        texts = (json.dumps(choice, separators=(",", ":")) for choice in choices)
        return "".join(f'{self._head},"choices":[{choice}]{counts}}}\n\n' for choice in texts)

    def _last_chunk(self) -> str:
        parts: dict[str, Any] = {}
        if self._usage_at_end:
            parts["usage"] = usage(self._call, self._cursors)
        if self._call.body.return_speculation:
            parts["speculation"] = speculation(self._call)
        return f'{self._head},"choices":[],{json.dumps(parts)[1:]}\n\n' if parts else ""
