"""How often one client may ask for things that cost no tokens: beyond that it waits its turn.

A generation is bounded by the queue. But opening connections, polling figures and sending requests that end in an error
are cheap for a client, and each takes some of the interpreter's time from the streams of others. A client, which is an
IP address here, has so many of them a second, and as many seconds' worth at once after a pause; later ones are delayed,
not refused, so that a monitoring tool that polls too often still gets its answers.
"""

import time
from collections.abc import Callable

from paceline.serve.http.logs import log

BURST_S = 2.0  # seconds' worth that a client may use at once; half of it delays pages that load several things
MAX_REMEMBERED = 4096  # clients; those whose turn has passed are forgotten then
WARN_EVERY_S = 60.0


class Pace:
    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 1.0 / per_second
        self._clock = clock
        self._next_s: dict[str, float] = {}  # client -> when its next turn is, if it came evenly
        self._warned_s = -WARN_EVERY_S

    def delay_s(self, client: str) -> float:
        """Take a turn; how long to wait for it."""
        now_s = self._clock()
        turn_s = max(self._next_s.get(client, 0.0), now_s - BURST_S)
        self._next_s[client] = turn_s + self._interval_s
        if len(self._next_s) > MAX_REMEMBERED:
            self._next_s = {known: at_s for known, at_s in self._next_s.items() if at_s > now_s - BURST_S}
        if turn_s <= now_s:
            return 0.0
        if now_s - self._warned_s > WARN_EVERY_S:
            self._warned_s = now_s
            log("paced", client=client, option="--max-rate-per-client", per_second=round(1.0 / self._interval_s, 3))
        return turn_s - now_s
