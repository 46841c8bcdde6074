"""What things cost, measured: a drafter's call whenever it is made, and the present price of a second in tokens.

What a pass costs is in lab/live_pass_cost.py. A drafter's price is never inferred from what it reads or is built of:
the same method may be nearly free in one engine and take half of a step in another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.spec.auto.constants import LASTING, PASSAGE, TRIED

CALL_MEMORY = 0.5 ** (8.0 / LASTING)  # decay of a call's weight with each later one


def _line(sums: Sequence[float]) -> tuple[float, float]:
    """The best line with neither part below zero."""
    weight, n, nn, s, ns = sums
    spread = weight * nn - n * n
    slope = (weight * ns - n * s) / spread if spread > 1e-9 * nn * weight else ns / nn
    start = (s - slope * n) / weight
    if start < 0.0:
        return 0.0, ns / nn
    return (start, slope) if slope > 0.0 else (s / weight, 0.0)


class DrafterCost:
    """Seconds that asking a drafter takes, telling it of the pass included: call + each x requests, and how much of
    that a level takes. Straight lines through the calls made, of which old ones count less.

    In units of a pass of one row. Before the first call it is thought to take a fifth of that for one request, and a
    whole one for eight, on any machine."""

    def __init__(self) -> None:
        # Sums over calls, each weighing less with every later one: 1, n, n*n, seconds, n*seconds
        self.calls = [0.2, 0.9, 6.5, 0.12, 0.82]
        self.levels = [0.2, 0.6, 2.0, 0.12, 0.42]  # likewise, with levels instead of requests
        self.num_learned = 0
        self._draw()

    def _draw(self) -> None:
        self._call, self._each = _line(self.calls)
        self._level = _line(self.levels)[1]

    def learn(self, seconds: float, num_requests: int, num_levels: int, unit_s: float) -> None:
        passes = seconds / unit_s
        expected = self._call + self._each * num_requests
        if self.num_learned >= TRIED:  # one stall must not look like a price; what is so expensive shows it again
            passes = min(passes, 0.05 + 2.0 * expected)
        else:
            if not self.num_learned:  # it takes in a prompt and wakes caches: an upper bound, and often a bad one
                passes = min(passes, 4.0 * expected)
            elif self.num_learned > 1:  # of the next few the least counts
                passes = min(passes, expected)
            for sums in (self.calls, self.levels):  # of what was believed before, the proportions are kept
                sums[3:] = [one * passes / max(expected, 1e-9) for one in sums[3:]]
        for sums, count in ((self.calls, num_requests), (self.levels, num_levels)):
            weight, n, nn, s, ns = sums
            sums[:] = (
                CALL_MEMORY * weight + 1.0,
                CALL_MEMORY * n + count,
                CALL_MEMORY * nn + count * count,
                CALL_MEMORY * s + passes,
                CALL_MEMORY * ns + count * passes,
            )
        self.num_learned += 1
        self._draw()

    def restore(self, sums: Sequence[float]) -> None:
        """All calls of another run weigh as much as one of this."""
        self.calls, self.levels = [one / sums[0] for one in sums[:5]], [one / sums[5] for one in sums[5:]]
        self.num_learned = TRIED
        self._draw()

    def parts(self, unit_s: float) -> tuple[float, float]:
        """Seconds of a call, and of each request in it."""
        return self._call * unit_s, self._each * unit_s

    def least_s(self, num_requests: int, unit_s: float) -> float:
        """What asking for so many may take at least: before some calls were made, nearly nothing."""
        call_s, each_s = self.parts(unit_s)
        return (call_s + each_s * num_requests) * (1.0 if self.num_learned >= TRIED else 0.1)

    def level_s(self, num_requests: int, unit_s: float) -> float:
        """What one more level takes, for each of so many requests."""
        return self._level * unit_s / max(1, num_requests)


class Market(NamedTuple):
    """Today's prices."""

    step: int
    num_requests: int  # in the next pass
    unit_s: float  # a pass of one row
    plain_s: float  # the next pass without drafts
    tokens_per_s: float
    row_price: float  # tokens that the time of one more row is worth


class Price:
    """The batch's present tokens per second: what a second is worth. It follows the last steps, and is never less than
    what plain decoding gives, so that nothing is bought that plain decoding would beat."""

    def __init__(self) -> None:
        self._tokens = self._passes = 1.0  # per request and step; and the step's time in plain passes

    def learn(self, tokens_per_request: float, seconds_in_passes: float, num_steps: int = 1) -> None:
        weight = 1.0 - (1.0 - 1.0 / PASSAGE) ** num_steps
        self._tokens += weight * (tokens_per_request - self._tokens)
        self._passes += weight * (min(seconds_in_passes, 4.0) - self._passes)

    def tokens_per_s(self, num_requests: int, plain_s: float) -> float:
        return num_requests / plain_s * max(1.0, self._tokens / self._passes)
