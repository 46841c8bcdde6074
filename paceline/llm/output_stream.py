"""From the engine's thread to the reader of one request: deltas, in the reader's event loop.

A slow reader skips no token: deltas that it has not read yet are merged, and never more than the answer.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.core.output_merger import OutputMerger
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.engine.job import Job

News = RequestOutput | Exception


class OutputStream:
    """All but the constructor's arguments belongs to the thread of the event loop that made it."""

    def __init__(self, job: Job, kind: RequestOutputKind) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self._kind = kind
        self._merger = OutputMerger()  # what the next output holds
        if kind is not RequestOutputKind.DELTA:
            self._merger.add(job.nothing())
        self._is_ready = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, news: News) -> None:
        """A delta, or what ends the stream."""
        if isinstance(news, Exception):
            self._error = self._error or news
        else:
            self._merger.add(news)
            self._is_ready = self._kind is not RequestOutputKind.FINAL_ONLY or news.finished
        self._changed.set()

    async def next(self) -> RequestOutput:
        """The next output; raises what ended the stream once all before it was read."""
        while not self._is_ready:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        output, self._is_ready = self._merger.output(), False
        if self._kind is RequestOutputKind.DELTA:
            self._merger = OutputMerger()
        return output


def post(
    loop: asyncio.AbstractEventLoop,
    news: Sequence[tuple[OutputStream, News]],
    when_read: Callable[[float], None] | None = None,
) -> None:
    """From another thread, to streams that are all read in `loop`. One call for all, because each is a system call.

    `when_read` gets the seconds that the loop took until every reader who could go on at once had done so."""

    def deliver() -> None:
        begin_s = time.perf_counter()
        for stream, item in news:
            stream.put(item)
        if when_read is not None:  # the loop goes on with readers in the order in which they were woken
            loop.call_soon(lambda: when_read(time.perf_counter() - begin_s))

    with suppress(RuntimeError):  # the loop is closed: there is no reader any more
        loop.call_soon_threadsafe(deliver)
