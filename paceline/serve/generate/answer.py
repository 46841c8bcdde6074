"""The response of all generation routes: one body, or a stream of server-sent events.

    body -> prepare -> Call -> run -> writer -> socket        (prepare.py, run.py, whole_answer.py or event_stream.py)

Everything happens when the response is sent, under one ticket of the gate: the queue, the deadline, the client hanging
up and the shutdown all reach the work through it. Headers wait for the first token, so that whatever goes wrong before
it is an HTTP status; after it, an error is the stream's last event.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.serve.generate.call import Call
from paceline.serve.generate.event_stream import EventStream
from paceline.serve.generate.prepare import prepare
from paceline.serve.generate.run import Writer, run
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.generate.service import Service
from paceline.serve.generate.whole_answer import WholeAnswer
from paceline.serve.http.gate import GONE, TIMEOUT, Ticket
from paceline.serve.http.limits import num_sequences
from paceline.serve.http.middleware import CALL, REQUEST_ID
from paceline.serve.http.request_bodies import GenerationRequest
from paceline.serve.http.tenants import TENANT


class Whole(Writer, Protocol):
    async def body(self) -> bytes: ...


class Stream(Writer, Protocol):
    @property
    def started(self) -> bool: ...

    async def end(self) -> None: ...

    async def fail(self, error: Exception) -> None: ...  # after the first event


class Shape(Protocol):
    """What a route's answers look like."""

    def call_id(self, request_id: str) -> str: ...

    def own_error(self, error: Exception) -> Exception: ...  # by the names that the route's clients know

    def whole(self, call: Call, backend: ServedEngine) -> Whole: ...

    def stream(self, call: Call, backend: ServedEngine, send: Send) -> Stream: ...


@dataclass(frozen=True, slots=True)
class Completions:
    """Chat and plain completions."""

    kind: str

    def call_id(self, request_id: str) -> str:
        return f"{self.kind}-{request_id}"

    def own_error(self, error: Exception) -> Exception:
        return error

    def whole(self, call: Call, backend: ServedEngine) -> Whole:
        return WholeAnswer(call, backend)

    def stream(self, call: Call, backend: ServedEngine, send: Send) -> Stream:
        return EventStream(call, backend, send)


CHAT, PLAIN = Completions("chatcmpl"), Completions("cmpl")


class GenerationResponse(Response):
    def __init__(self, service: Service, body: GenerationRequest, shape: Shape) -> None:
        super().__init__()
        self._service = service
        self._body = body
        self._shape = shape
        self._stream: Stream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        with service.gate.enter(num_sequences(self._body, service.config)) as ticket:
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
        service = self._service
        call = await prepare(service, self._body, self._shape.call_id(scope[REQUEST_ID]), scope[TENANT])
        scope[CALL] = call  # for the access log
        if self._body.stream:
            self._stream = self._shape.stream(call, service.backend, send)
            await run(service, call, self._stream)
            await self._stream.end()
        else:
            answer = self._shape.whole(call, service.backend)
            await run(service, call, answer)
            await Response(await answer.body(), media_type="application/json")(scope, receive, send)

    async def _fail(self, error: Exception) -> None:
        """Before the first event an error is a status; after it, the last event."""
        error = self._shape.own_error(error)
        if self._stream is None or not self._stream.started:
            raise error
        await self._stream.fail(error)


async def _until_gone(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.end(GONE)
