"""Server-sent events to one client: headers with the first of them, and a last word for one that cannot get on."""

import asyncio
import logging

from starlette.types import Send

from paceline.serve.http.errors import ApiError, as_api_error
from paceline.serve.http.logs import log

FAREWELL_S = 1.0  # a reader that does not take the last event within this is not waited for
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass tokens on as they come
]


class EventSender:
    def __init__(self, send: Send, call_id: str) -> None:
        self.started = False
        self._send = send
        self._call_id = call_id
        self._sending = asyncio.Lock()  # prompts are written side by side: nothing may go before the headers

    async def write(self, text: str) -> None:
        async with self._sending:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def failure(self, error: Exception) -> ApiError:
        """What the client is told of it; the log gets the rest."""
        answer = as_api_error(error, self._call_id)
        if answer.code == "internal":
            log("stream_failed", level=logging.ERROR, id=self._call_id, error=error)
        else:
            log("stream_failed", id=self._call_id, reason=str(error))
        return answer

    async def say_last(self, text: str) -> None:
        """Tell a client that already has a part of its answer."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.write(text)
                await self.end()
        except TimeoutError:
            log("reader_stuck", id=self._call_id)
