"""One TCP connection: uvicorn's HTTP/1.1 protocol, with limits on what a client may send before it is known.

Keys, bodies and answers are the application's business (middleware.py). Here is what comes before and around it:

- the first line and headers of a request have a size and a time limit; so has a connection that says nothing
- trailers are not kept, and what a request sends in all is bounded, however its body is cut into chunks
- an answer that comes before the end of the body closes the connection: the rest is not read
- a reader that takes nothing of its answer is cut off
- connections are counted, in all and by client, and a client that opens them too fast waits (pace.py)

A refusal is a short JSON error, then the connection is closed.
"""

import asyncio
import json
from collections import Counter
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.serve.config import ServerConfig
from paceline.serve.http.errors import ApiError
from paceline.serve.http.pace import Pace

LINGER_S = 2.0
CHUNKING_OVERHEAD = 8  # bytes sent for each byte of a body, at the most: one-byte chunks take six


class Connections:
    """How many there are, by client: the same for all connections of a server."""

    def __init__(self) -> None:
        self.total = 0
        self.by_client: Counter[str] = Counter()

    def add(self, client: str) -> None:
        self.total += 1
        self.by_client[client] += 1

    def remove(self, client: str) -> None:
        self.total -= 1
        self.by_client[client] -= 1
        if not self.by_client[client]:
            del self.by_client[client]


class _AnswerEnd:
    """The transport as uvicorn's answers see it: closing it does not cut off a client that is still sending."""

    def __init__(self, protocol: "LimitedProtocol") -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.end_answer()


def limited_protocol(limits: ServerConfig, pace: Pace) -> type["LimitedProtocol"]:
    """The protocol class that uvicorn makes a connection from."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "counted": Connections(), "pace": pace})


class LimitedProtocol(HttpToolsProtocol):
    limits: ClassVar[ServerConfig]
    counted: ClassVar[Connections]
    pace: ClassVar[Pace]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_headers = True
        self._num_bytes = 0  # received since the request began
        self._closing = False  # refused: what still comes in is dropped
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def _client_host(self) -> str:
        return self.client[0] if self.client else ""

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.counted.add(self._client_host)
        if self.counted.total > self.limits.max_connections:
            self._refuse(ApiError(503, "this server has all the connections it takes: try again later"))
        elif self.counted.by_client[self._client_host] > self.limits.max_connections_per_client:
            most = self.limits.max_connections_per_client
            self._refuse(ApiError(429, f"at most {most} connections per client: close some", code="connections"))
        elif (delay_s := self.pace.delay_s(self._client_host)) > 0:
            transport.pause_reading()
            self._header_timer = self.loop.call_later(delay_s, self._take_turn)
        else:
            self._await_headers()

    def _take_turn(self) -> None:
        if not self._closing and not self.transport.is_closing():
            self.transport.resume_reading()
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.counted.remove(self._client_host)
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._header_timer is None and self._in_headers:
            self._await_headers()  # the next request of a connection that is kept
        room = self.limits.max_header_bytes + 1 - self._num_bytes
        if self._in_headers and len(data) > room > 0:  # headers past the limit are not even parsed
            self.data_received(data[:room])
            self.data_received(data[room:])
            return
        self._num_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_bytes > self.limits.max_header_bytes:
            most = self.limits.max_header_bytes
            self._refuse(ApiError(431, f"the request's headers are above {most} bytes", code="headers_too_large"))
        elif self._num_bytes > self.limits.max_header_bytes + CHUNKING_OVERHEAD * self.limits.max_body_bytes:
            self._abort()

    # the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # later ones are trailers, which are not read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._cancel_header_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _AnswerEnd(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True  # whatever comes next
        self._num_bytes = 0

    def on_response_complete(self) -> None:
        unread = self._is_body_unread()
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self._linger()

    def end_answer(self) -> None:
        """An answer is over, and nothing follows on this connection."""
        if self._is_body_unread():
            self._linger()
        else:
            self.transport.close()

    def _is_body_unread(self) -> bool:
        return self.cycle is not None and self.cycle.more_body and not self.pipeline

    # slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self.limits.read_timeout_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None and not self._closing:
            self._read_timer.cancel()
            self._read_timer = None

    # ends

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._headers_late)

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._num_bytes:
            seconds = self.limits.header_timeout_s
            self._refuse(ApiError(408, f"the headers did not come within {seconds:g} s", code="timeout"))
        else:
            self._close()

    def _refuse(self, error: ApiError) -> None:
        if self._closing or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._abort()  # in the middle of an answer there is no place for another one
            return
        body = json.dumps(error.body()).encode()
        lines = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body]))
        self._linger()

    def _linger(self) -> None:
        """Close after a while in which what still comes in is dropped: closing at once would reset the connection,
        and a client that is still sending would never see its answer."""
        if self._closing:
            return
        self._closing = True
        self._cancel_timers()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._read_timer = self.loop.call_later(LINGER_S, self._abort)

    def _close(self) -> None:
        self._closing = True
        self.transport.close()

    def _abort(self) -> None:
        self._closing = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # now: the loop tells of it a moment later, and writing until then raises
            self.cycle.message_event.set()
        self.transport.abort()

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_timers(self) -> None:
        self._cancel_header_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
