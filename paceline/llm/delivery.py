"""When readers are told what is new: after every step, unless telling them takes time that the engine needs.

Threads of Python take turns. To make, format and send a piece for each of 64 streams takes several milliseconds of
the interpreter, and a step of a GPU takes one. So a delivery that took `t` is followed by a rest of `REST` x `t`, at
most `MAX_REST_S`, in which deltas merge. First tokens and ends do not wait. Where steps are longer than that, as on a
CPU, every step is told.
"""

import time
from collections.abc import Callable, Sequence

from paceline.engine.job import Job
from paceline.engine.request_state import RequestState
from paceline.llm.output_stream import News, OutputStream, post

# On a GPU with 64 streams: 9,800 tokens a second when every step was told, 18,000 with rests of 4 x t up to 20 ms,
# 25,000 with these.
REST = 9.0  # telling takes a tenth of the time
MAX_REST_S = 0.04  # 25 pieces a second for each stream: as smooth as a film


class Delivery:
    """All but `_rest` belongs to the engine's thread."""

    def __init__(self, news: Callable[[Job], News], clock: Callable[[], float] = time.perf_counter) -> None:
        self._news = news
        self._clock = clock
        self._readers: dict[int, OutputStream] = {}  # by the id of a state: whom its tokens are for
        self._waiting: dict[int, OutputStream] = {}  # streams with news that were not told, by id
        self._told: set[int] = set()  # streams that have their first token
        self._next_s = 0.0  # when the next delivery is due

    def follow(self, stream: OutputStream) -> None:
        for state in stream.job.states:
            self._readers[id(state)] = stream

    def forget(self, stream: OutputStream) -> None:
        for state in stream.job.states:
            self._readers.pop(id(state), None)
        self._waiting.pop(id(stream), None)
        self._told.discard(id(stream))

    def note(self, updated: Sequence[RequestState]) -> None:
        """After a step that changed these."""
        urgent: dict[int, OutputStream] = {}
        for state in updated:
            stream = self._readers.get(id(state))
            if stream is None:
                continue
            self._waiting[id(stream)] = stream
            if state.request.finished or id(stream) not in self._told:
                urgent[id(stream)] = stream
        if self._clock() >= self._next_s:
            self.flush()
        elif urgent:
            self._deliver(urgent)

    def tell(self, stream: OutputStream) -> None:
        self._deliver({id(stream): stream})

    def flush(self) -> None:
        """Tell all that is known."""
        self._deliver(dict(self._waiting))

    def _deliver(self, streams: dict[int, OutputStream]) -> None:
        if not streams:
            return
        self._next_s = self._clock() + MAX_REST_S  # unless the loop says that it was quick
        by_loop: dict[int, list[tuple[OutputStream, News]]] = {}
        for stream in streams.values():
            by_loop.setdefault(id(stream.loop), []).append((stream, self._news(stream.job)))
            self._told.add(id(stream))
            self._waiting.pop(id(stream), None)
        for news in by_loop.values():
            post(news[0][0].loop, news, self._rest)

    def _rest(self, seconds: float) -> None:
        """Called in a reader's thread, once readers have done with a delivery."""
        self._next_s = self._clock() + min(REST * seconds, MAX_REST_S)
