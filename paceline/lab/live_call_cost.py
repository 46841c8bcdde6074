"""What asking a drafter takes, learned from the calls that are made: the twin of lab/live_pass_cost.py."""

from collections.abc import Sequence

HALF_LIFE = 32  # calls after which one counts half. Half: jitters; twice: lags
FEW_CALLS = 4  # as long as so few were made, each may be far off
DEPTH_MEMORY = 12  # likewise for how deep drafts are, lately
MEMORY = 0.5 ** (1.0 / HALF_LIFE)


class CallCostModel:
    """Seconds that asking a drafter takes, telling it of the pass included: call + each x requests. A straight line
    through the calls made, of which old ones count less.

    In units of a pass of one row. Before the first call it is thought to take a fifth of that for one request, and a
    whole one for eight, on any machine."""

    def __init__(self) -> None:
        # Sums over calls, each weighing less with every later one: 1, n, n*n, seconds, n*seconds
        self.sums = [0.2, 0.9, 6.5, 0.12, 0.82]
        self.depth = 1.0  # of its drafts, lately
        self.num_learned = 0
        self._draw()

    def _draw(self) -> None:
        """The best line with neither part below zero."""
        weight, n, nn, s, ns = self.sums
        spread = weight * nn - n * n
        slope = (weight * ns - n * s) / spread if spread > 1e-9 * nn * weight else ns / nn
        start = (s - slope * n) / weight
        if start < 0.0:
            start, slope = 0.0, ns / nn
        elif slope < 0.0:
            start, slope = s / weight, 0.0
        self._call, self._each = start, slope

    def learn(self, seconds: float, num_requests: int, num_levels: int, unit_s: float) -> None:
        passes = seconds / unit_s
        expected = self._call + self._each * num_requests
        if self.num_learned >= FEW_CALLS:  # one stall must not look like a price; what is so expensive shows it again
            passes = min(passes, 0.05 + 2.0 * expected)
        else:
            if (
                self.num_learned != 1
            ):  # the first takes in a prompt and wakes caches; of the later ones the least counts
                passes = min(passes, expected)
            share = passes / max(expected, 1e-9)  # of what was believed before, the proportions are kept
            self.sums[3:] = [share * one for one in self.sums[3:]]
        weight, n, nn, s, ns = self.sums
        self.sums = [
            MEMORY * weight + 1.0,
            MEMORY * n + num_requests,
            MEMORY * nn + num_requests * num_requests,
            MEMORY * s + passes,
            MEMORY * ns + num_requests * passes,
        ]
        if num_levels:
            self.depth += (num_levels - self.depth) / DEPTH_MEMORY
        self.num_learned += 1
        self._draw()

    def state(self) -> list[float]:
        """To be kept, and given to `restore` of another one."""
        return list(self.sums)

    def restore(self, state: Sequence[float]) -> None:
        """All calls of another run weigh as much as one of this; nothing where they cannot have been."""
        if min(state) > 0.0:
            self.sums, self.num_learned = [one / state[0] for one in state], FEW_CALLS
            self._draw()

    def parts(self, unit_s: float) -> tuple[float, float]:
        """Seconds of a call, and of each request in it."""
        return self._call * unit_s, self._each * unit_s

    def least_s(self, num_requests: int, unit_s: float) -> float:
        """What asking for so many may take at least: before its second call, nearly nothing."""
        return (self._call + self._each * num_requests) * unit_s * (1.0 if self.num_learned > 1 else 0.1)

    def level_s(self, num_requests: int, unit_s: float) -> float:
        """What one more level takes, for each of so many requests; the call itself is like two more."""
        return (self._call / num_requests + self._each) * unit_s / (2.0 + self.depth)
