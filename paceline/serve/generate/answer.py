"""The response of both generation routes: one body, or a stream of server-sent events.

Everything happens when the response is sent, under one ticket of the gate: the queue, the deadline, the client hanging
up and the shutdown all reach the work through it. Headers wait for the first token, so that whatever goes wrong before
it is an HTTP status; after it, an error is the stream's last event.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.core.outputs import RequestOutput
from paceline.serve.generate.deltas import Cursor, Delta
from paceline.serve.generate.figures import prompt_logprobs, speculation, usage
from paceline.serve.generate.formats import Format, format_for
from paceline.serve.generate.service import Call, Service
from paceline.serve.http.errors import as_api_error
from paceline.serve.http.gate import GONE, TIMEOUT, Ticket
from paceline.serve.http.logs import log
from paceline.serve.http.middleware import CALL, REQUEST_ID
from paceline.serve.http.request_bodies import GenerationRequest
from paceline.serve.http.tenants import TENANT
from paceline.serve.http.worker import in_worker

FAREWELL_S = 1.0  # a reader that does not take the last event within this is not waited for
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass tokens on as they come
]


class GenerationResponse(Response):
    def __init__(self, service: Service, body: GenerationRequest) -> None:
        super().__init__()
        self._service = service
        self._body = body
        self._stream: EventStream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with service.gate.enter(service.num_sequences(self._body)) as ticket:
            watcher = asyncio.create_task(_until_gone(receive, ticket))
            try:
                async with ticket.scope():
                    await self._answer(scope, receive, send)
            except TimeoutError:
                ended_by = ticket.ended_by or TIMEOUT
                service.metrics.ended.inc(1, ended_by)
                if ended_by != GONE:
                    await self._fail(ticket.error())
            except Exception as error:
                await self._fail(error)
            finally:
                watcher.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = await self._service.prepare(self._body, scope[REQUEST_ID], scope[TENANT])
        scope[CALL] = call  # for the access log
        if self._body.stream:
            self._stream = EventStream(self._service, call, send)
            await self._stream.run()
        else:
            answer = await whole_answer(self._service, call)
            await Response(answer, media_type="application/json")(scope, receive, send)

    async def _fail(self, error: Exception) -> None:
        """Before the first event an error is a status; after it, the last event."""
        if self._stream is None or not self._stream.started:
            raise error
        await self._stream.fail(error)


async def _until_gone(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.end(GONE)


async def whole_answer(service: Service, call: Call) -> bytes:
    last: dict[int, RequestOutput] = {}
    states = service.states(call)
    async with aclosing(states):  # type: ignore[type-var]
        async for prompt, output in states:
            last[prompt] = output
    return await in_worker(call.num_entries, lambda: _render(service, call, last))


def _render(service: Service, call: Call, last: Mapping[int, RequestOutput]) -> bytes:
    """The answer as JSON, choice by choice: no single step holds the interpreter for long."""
    tokenizer = service.backend.tokenizer
    shape, cursors = format_for(call, tokenizer), service.cursors(call)
    choices = ",".join(
        _json(_choice(shape, delta, whole=True))
        for prompt in range(len(call.prompts))
        for state in last[prompt].outputs
        if (delta := cursors[prompt * call.params.n + state.index].advance(state))
    )
    head = {"id": call.id, "object": shape.object, "created": call.created, "model": call.model}
    rest: dict[str, Any] = {"usage": usage(call, cursors)}
    if call.body.return_speculation:
        rest["speculation"] = speculation(call)
    if call.body.prompt_logprobs is not None:
        rest["prompt_logprobs"] = prompt_logprobs(call, tokenizer)
    return f'{_json(head)[:-1]},"choices":[{choices}],{_json(rest)[1:]}'.encode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _choice(shape: Format, delta: Delta, *, whole: bool) -> dict[str, Any]:
    choice = shape.choice(delta, whole=whole)
    if delta.pieces is not None:
        choice["token_sources"] = [asdict(piece) for piece in delta.pieces]
    return choice


class EventStream:
    """A call as server-sent events: one chunk per step and choice, then the figures, then [DONE]."""

    def __init__(self, service: Service, call: Call, send: Send) -> None:
        self.started = False
        self._service = service
        self._call = call
        self._send = send
        self._shape = format_for(call, service.backend.tokenizer)
        head = {"id": call.id, "object": self._shape.chunk_object, "created": call.created, "model": call.model}
        self._head = "data: " + json.dumps(head, separators=(",", ":"))[:-1]  # open: choices follow
        options = call.body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    async def run(self) -> None:
        call = self._call
        states = self._service.states(call)
        async with aclosing(states):  # type: ignore[type-var]
            cursors: list[Cursor] = []
            async for prompt, output in states:
                cursors = cursors or self._service.cursors(call)
                deltas = [
                    delta
                    for state in output.outputs
                    if (delta := cursors[prompt * call.params.n + state.index].advance(state))
                ]
                if deltas:
                    await self._write(
                        await in_worker(self._num_entries(deltas), partial(self._chunks, deltas, cursors))
                    )
        await self._write(self._last_chunk(cursors) + "data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Tell a client that already has a part of its answer."""
        answer = as_api_error(error, self._call.id)
        if answer.code == "internal":
            log("stream_failed", level=logging.ERROR, id=self._call.id, error=error)
        else:
            log("stream_failed", id=self._call.id, reason=str(error))
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._write(f"data: {json.dumps(answer.body())}\n\ndata: [DONE]\n\n")
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log("reader_stuck", id=self._call.id)

    def _num_entries(self, deltas: Sequence[Delta]) -> int:
        """How many log-probabilities these deltas list; a prompt's come with a choice's first one."""
        params = self._call.params
        rows = sum(len(delta.logprobs) for delta in deltas if delta.logprobs is not None) * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None and any(delta.first for delta in deltas):
            rows += sum(map(len, self._call.prompts)) * params.n * (1 + params.prompt_logprobs)
        return rows

    def _chunks(self, deltas: Sequence[Delta], cursors: Sequence[Cursor]) -> str:
        return "".join(self._chunk(delta, cursors) for delta in deltas)

    def _chunk(self, delta: Delta, cursors: Sequence[Cursor]) -> str:
        choice = json.dumps(_choice(self._shape, delta, whole=False), separators=(",", ":"))
        counts = f',"usage":{json.dumps(usage(self._call, cursors))}' if self._usage_always else ""
        return f'{self._head},"choices":[{choice}]{counts}}}\n\n'

    def _last_chunk(self, cursors: Sequence[Cursor]) -> str:
        parts: dict[str, Any] = {}
        if self._usage_at_end:
            parts["usage"] = usage(self._call, cursors)
        if self._call.body.return_speculation:
            parts["speculation"] = speculation(self._call)
        return f'{self._head},"choices":[],{json.dumps(parts)[1:]}\n\n' if parts else ""

    async def _write(self, text: str) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})
