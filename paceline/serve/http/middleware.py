"""Around every route: a request id, the API key, the body's size, one log line, and no traceback to clients."""

import asyncio
import logging
import time
import uuid

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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if generates and 400 <= message["status"] < 500:
                    await self._take_turn(scope)
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if not generates:
                await self._take_turn(scope)
            scope[TENANT] = self._keys.tenant(scope)
            await self._app(scope, self._limited(scope, receive), send_with_id)
        except ClientDisconnect:
            pass  # it hung up while its body was read: there is nobody to answer
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

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Refuses a body past the limit, by its announced length or as it comes in, and one that comes too slowly."""
        limit, seconds = self._max_body_bytes, self._body_timeout_s
        too_large = ApiError(413, f"the body is above this server's limit of {limit} bytes", code="body_too_large")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and _is_above(value, limit):
                raise too_large
        num_bytes, complete = 0, False
        deadline_s = asyncio.get_running_loop().time() + seconds

        async def limited() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # the next news is that the client is gone
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {seconds:g} s", code="timeout") from None
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > limit:
                raise too_large
            return message

        return limited

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._known_paths else "other"
        self._metrics.http.inc(1, path, str(status or "gone"))
        call = scope.get(CALL)
        if call is None and path in ("/health", "/metrics", "/api/live", "other") and status < 500:
            return  # polled every second: a line each would bury the rest
        details = {} if call is None else call.log_fields()
        log("request", id=scope[REQUEST_ID], path=path, status=status or "gone", seconds=round(seconds, 6), **details)


def _is_above(digits: bytes, limit: int) -> bool:
    """Whether a number is too large, without making one of thousands of digits."""
    return len(digits) > 18 or int(digits) > limit
