"""Around every route: a request id, the API key, the body's size, one log line, and no traceback to clients."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.config import ServerConfig
from paceline.serve.http.errors import ApiError, as_api_error
from paceline.serve.http.logs import log
from paceline.serve.http.pace import Pace
from paceline.serve.http.tenants import TENANT, Keys
from paceline.serve.observe.metrics import Metrics

REQUEST_ID, CALL = "paceline.request_id", "paceline.call"  # keys of the ASGI scope
IGNORED = "paceline.ignored"  # likewise: fields of the body that nobody knows


MAX_SHOWN_NAME = 64  # characters of an unknown field's name


class Guard:
    """Pure ASGI: a token passes through one extra function call and nothing is buffered."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        metrics: Metrics,
        pace: Pace,
        known_paths: frozenset[str],
        generating_paths: frozenset[str],
    ) -> None:
        self._app = app
        self._keys = Keys(config.api_keys, config.admin_keys)
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout_s = config.body_timeout_s
        self._metrics = metrics
        self._pace = pace
        self._generating_paths = generating_paths  # they have their queue: only their errors are paced
        self._known_paths = known_paths  # others share one label: a scanner must not grow the metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = time.perf_counter()
        request_id = scope[REQUEST_ID] = uuid.uuid4().hex
        generates = scope["path"] in self._generating_paths
        status = 0
        body = _LimitedBody(scope, receive, self._max_body_bytes, self._body_timeout_s)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if generates and 400 <= message["status"] < 500:
                    await self._take_turn(scope)
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if IGNORED in scope:
                    message["headers"].append((b"x-paceline-ignored-fields", _names(scope[IGNORED]).encode()))
                if not body.complete:  # the rest is not read, so nothing can follow on this connection
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            if not generates:
                await self._take_turn(scope)
            scope[TENANT] = self._keys.tenant(scope)
            body.check_length()
            await self._app(scope, body.receive, send_with_id)
        except ClientDisconnect:
            pass  # the client hung up while its body was read: there is nothing to answer
        except Exception as error:
            answer = as_api_error(error, request_id)
            if answer.status >= 500 and not isinstance(error, ApiError):
                log("internal_error", level=logging.ERROR, id=request_id, error=error)
            if status == 0:
                await JSONResponse(answer.body(), answer.status, answer.headers)(scope, receive, send_with_id)
        finally:
            self._note(scope, status, time.perf_counter() - begin_s)

    async def _take_turn(self, scope: Scope) -> None:
        client = scope.get("client")
        delay_s = self._pace.delay_s(client[0] if client else "")
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._known_paths else "other"
        self._metrics.http.inc(1, path, str(status or "gone"))
        call = scope.get(CALL)
        if call is None and path in ("/health", "/metrics", "/api/live", "other") and status < 500:
            return  # polled every second: a line each would hide the rest
        details = {} if call is None else call.log_fields()
        if IGNORED in scope:
            details["ignored_fields"] = _names(scope[IGNORED])
        log("request", id=scope[REQUEST_ID], path=path, status=status or "gone", seconds=round(seconds, 6), **details)


def _names(fields: Sequence[str]) -> str:
    """For a header: a client's words, so anything but plain characters is written as %XX."""
    return ", ".join(quote(name[:MAX_SHOWN_NAME], errors="replace") for name in fields)


class _LimitedBody:
    """Refuses a body past the limit, by its announced length or as it comes in, and one that comes too slowly."""

    def __init__(self, scope: Scope, receive: Receive, limit: int, seconds: float) -> None:
        self._receive = receive
        self._limit = limit
        self._seconds = seconds
        self._deadline_s = asyncio.get_running_loop().time() + seconds
        self._num_bytes = 0
        announced = dict(scope["headers"])
        self._length: bytes = announced.get(b"content-length", b"0")
        self.complete = b"transfer-encoding" not in announced and not self._length.strip(b"0")

    def check_length(self) -> None:
        if self._length.isdigit() and _is_above(self._length, self._limit):
            raise self._too_large()

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()  # an empty body, or the news that the client is gone
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._seconds:g} s", code="timeout") from None
        self._num_bytes += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self._num_bytes > self._limit:
            raise self._too_large()
        return message

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is above this server's limit of {self._limit} bytes", code="body_too_large")


def _is_above(digits: bytes, limit: int) -> bool:
    """Whether a number is too large, without making one of thousands of digits."""
    return len(digits) > 18 or int(digits) > limit
