"""Around every route: a request id, the API key, the body's size, one log line, and no traceback to clients."""

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.config import ServerConfig
from paceline.serve.errors import ApiError, as_api_error
from paceline.serve.logs import log
from paceline.serve.metrics import Metrics

REQUEST_ID, CALL = "paceline.request_id", "paceline.call"  # keys of the ASGI scope

# Health checks, the page itself and the API's description hold nothing worth a key.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
OPEN_PREFIX = "/static/"
BODY_TIMEOUT_S = 30.0  # between two pieces of a body


class Keys:
    """Compares in constant time: every key is compared in full, whatever the answer."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, scope: Scope) -> None:
        path = scope["path"]
        if not self._digests or path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or scope["method"] == "OPTIONS":
            return
        given = hashlib.sha256(_bearer(scope)).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


class Guard:
    """Pure ASGI: a token passes through one extra function call and nothing is buffered."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics, known_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = Keys(config.api_keys)
        self._max_body_bytes = config.max_body_bytes
        self._metrics = metrics
        self._known_paths = known_paths  # others share one label: a scanner must not grow the metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = time.perf_counter()
        request_id = scope[REQUEST_ID] = uuid.uuid4().hex
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._keys.check(scope)
            await self._app(scope, self._limited(scope, receive), send_with_id)
        except Exception as error:
            answer = as_api_error(error, request_id)
            if answer.status >= 500 and not isinstance(error, ApiError):
                log("internal_error", level=logging.ERROR, id=request_id, error=error)
            if status == 0:
                await JSONResponse(answer.body(), answer.status, answer.headers)(scope, receive, send_with_id)
        finally:
            self._note(scope, status, time.perf_counter() - begin_s)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Refuses a body past the limit, by its announced length or as it comes in, and one that does not come."""
        limit = self._max_body_bytes
        too_large = ApiError(413, f"the body is above this server's limit of {limit} bytes", code="body_too_large")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise too_large
        num_bytes, complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # the next news is that the client is gone
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"no more of the body came for {BODY_TIMEOUT_S:g} s", code="timeout") from None
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
