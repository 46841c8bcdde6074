"""Requests that come at once are admitted at once.

Threads of Python take turns, and an engine that begins with the first of many requests leaves the event loop few turns
to read the others: 64 of them took 110 ms on a GPU. So while requests come close together, the next step waits a
little for one more.
"""

import time
from collections.abc import Callable

GAP_S = 0.001  # between two requests that came together; an event loop takes about half of it for one
MAX_WAIT_S = 0.01  # of a step


class Arrivals:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s = -1.0  # when the newest one came
        self._begin_s: float | None = None  # when the first one since the last step did
        self._are_close = False

    def note(self) -> None:
        """A request has come."""
        now_s = self._clock()
        self._are_close = now_s - self._last_s < GAP_S
        self._last_s = now_s
        if self._begin_s is None:
            self._begin_s = now_s

    def begin_step(self) -> None:
        self._begin_s = None

    def wait_s(self) -> float:
        """How long a step should wait for another one."""
        if self._begin_s is None or not self._are_close:
            return 0.0
        return max(0.0, min(self._last_s + GAP_S, self._begin_s + MAX_WAIT_S) - self._clock())
