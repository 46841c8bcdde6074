"""From the engine's thread to the reader of one request: deltas, in the reader's event loop.

A slow reader skips no token: deltas that it has not read yet are merged when it comes. They are never more than the
answer.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from paceline.core.outputs import RequestOutput, RequestOutputKind, merge_outputs
from paceline.engine.job import Job

News = RequestOutput | Exception


class OutputStream:
    """All but the constructor's arguments belongs to the thread of the event loop that made it."""

    def __init__(self, job: Job, kind: RequestOutputKind) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self._kind = kind
        self._before = [] if kind is RequestOutputKind.DELTA else [job.nothing()]  # what the next output begins with
        self._unread: list[RequestOutput] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, news: News) -> None:
        """A delta, or what ends the stream."""
        if isinstance(news, Exception):
            self._error = self._error or news
        else:
            self._unread.append(news)
        self._changed.set()

    async def next(self) -> RequestOutput:
        """The next output; raises what ended the stream once all before it was read."""
        while not self._is_ready():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        output = merge_outputs([*self._before, *self._unread])
        self._unread = []
        if self._kind is not RequestOutputKind.DELTA:
            self._before = [output]
        return output

    def _is_ready(self) -> bool:
        if not self._unread:
            return False
        return self._kind is not RequestOutputKind.FINAL_ONLY or self._unread[-1].finished


def post(loop: asyncio.AbstractEventLoop, news: Sequence[tuple[OutputStream, News]]) -> None:
    """From another thread, to streams that are all read in `loop`: waking a loop costs a system call."""

    def deliver() -> None:
        for stream, item in news:
            stream.put(item)

    with suppress(RuntimeError):  # the loop is closed: nobody is listening any more
        loop.call_soon_threadsafe(deliver)
