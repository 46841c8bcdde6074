"""What clients see when something goes wrong: OpenAI's error body, with a status that its clients understand.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

A traceback never leaves the server; an unexpected error is logged under the request id that the client was given.
"""

from collections.abc import Mapping
from typing import Any

from paceline.errors import (
    EngineDeadError,
    GrammarLimitError,
    InvalidOptionError,
    InvalidRequestError,
    NothingToSampleError,
    PacelineError,
    RequestFailedError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class ApiError(PacelineError):
    """An answer that is an error. Raised anywhere below a route, turned into a response in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Our own errors say what to do, so clients get their words; anything else stays inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidOptionError | InvalidRequestError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine is not running: try another server, or restart this one", code="engine_dead")
    if isinstance(error, NothingToSampleError):
        return ApiError(400, str(error), code="nothing_to_sample")
    if isinstance(error, GrammarLimitError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RequestFailedError) and error.__cause__ is None:  # with a cause it quotes something internal
        return ApiError(500, str(error), code="request_failed")
    return ApiError(500, f"internal error; the server's log has it under request id {request_id}", code="internal")
