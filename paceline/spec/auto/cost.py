"""Today's prices: of a pass, of a step that waits for drafters, and of a second, in tokens. All measured.

What passes and drafters' calls take is learned in lab/live_pass_cost.py and lab/live_call_cost.py. A drafter's price is
never inferred from what it reads or is built of: the same method may be nearly free in one engine and take half of a
step in another.
"""

from bisect import bisect_right
from collections.abc import Sequence

from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.constants import LASTING, PASSAGE
from paceline.spec.merge.pool import PRICES


class Market:
    """Today's prices. A second is worth the tokens that the last steps gave in one, and never less than plain decoding
    gives: so nothing is bought that plain decoding would beat.

    Where passes can be launched ahead (engine/flight.py), a step in which drafters may be asked has to wait for them.
    What that takes is measured: such steps against those that were skipped, in which nobody was thought of. There
    the cost of a pass is learned from the skipped steps alone."""

    def __init__(self, passes: PassCostModel, launches_ahead: bool) -> None:
        self.passes, self._launches_ahead = passes, launches_ahead
        self.step = self.num_requests = self.place = 0
        self.unit_s = self.plain_s = self.tokens_per_s = self.row_price = self.share = 0.0  # place, share: in PRICES
        self.wait_s = self.own_s = 0.0  # of a step in which drafters may be asked: waiting, and deciding
        self._num_waits = 0
        self._tokens = self._steps = 1.0  # lately, per request and step; and a step's time in plain ones

    @property
    def awake_s(self) -> float:
        """What a step takes longer because drafters may be asked in it, whoever they are."""
        return self.wait_s + self.own_s

    def quote(self, num_requests: int) -> None:
        passes = self.passes
        self.num_requests = num_requests
        self.unit_s, self.plain_s = passes.at(1, 1), passes.at(num_requests, num_requests)
        self.tokens_per_s = num_requests / self.plain_s * max(1.0, self._tokens / self._steps)
        rows = max(4, num_requests)  # one row alone may be the first of a tile
        row_s = (passes.at(num_requests + rows, num_requests) - self.plain_s) / rows
        self.row_price = self.tokens_per_s * row_s
        self.place = min(len(PRICES) - 2, bisect_right(PRICES, self.row_price) - 1)
        low, high = PRICES[self.place], PRICES[self.place + 1]
        self.share = min(1.0, (self.row_price - low) / (high - low))

    def at_row_price(self, gains: Sequence[float]) -> float:
        """Of gains at PRICES."""
        low = gains[self.place]
        return low + self.share * (gains[self.place + 1] - low)

    def learn_step(self, num_rows: int, seconds: float, num_requests: int) -> None:
        """What a step took in which drafters might be asked."""
        if not self._launches_ahead:
            self.passes.observe(num_rows, seconds, num_requests)
            return
        extra_s = max(0.0, seconds - self.passes.at(num_rows, num_requests))
        self._num_waits = min(self._num_waits + 1, LASTING // 4)
        self.wait_s += (min(extra_s, 4.0 * self.plain_s) - self.wait_s) / self._num_waits

    def learn_skipped(self, intervals: Sequence[float]) -> None:
        """What each of the steps took that were skipped, the last ones before the present."""
        self.passes.observe(self.num_requests, sorted(intervals)[len(intervals) // 2], self.num_requests)

    def learn_rate(self, tokens_per_request: float, seconds: float, num_steps: int = 1) -> None:
        """Of so many steps alike."""
        weight = 1.0 - (1.0 - 1.0 / PASSAGE) ** num_steps
        self._tokens += weight * (tokens_per_request - self._tokens)
        self._steps += weight * (min(seconds / self.plain_s, 4.0) - self._steps)
