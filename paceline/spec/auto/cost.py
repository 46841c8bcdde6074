"""Today's prices: of a pass, of a row in it, and of a second, in tokens. All measured.

What passes and drafters' calls take is learned in lab/live_pass_cost.py and lab/live_call_cost.py. A drafter's price is
never inferred from what it reads or is built of: the same method may be nearly free in one engine and take half of a
step in another.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.constants import PASSAGE
from paceline.spec.merge.pool import PRICES


class Market:
    """A second is worth the tokens that the last steps gave in one, and never less than plain decoding gives: so
    nothing is bought that plain decoding would beat."""

    def __init__(self, passes: PassCostModel) -> None:
        self.passes = passes
        self.step = self.num_requests = self._place = 0
        self.unit_s = self.plain_s = self.tokens_per_s = self.row_price = self._share = 0.0  # place, share: in PRICES
        self.bought = 0, 0.0, 0.0  # in the last step: nodes, tokens expected of them, seconds of their rows
        self._rate = 1.0  # lately, in what plain decoding gives

    def quote(self, num_requests: int) -> None:
        passes = self.passes
        self.num_requests = num_requests
        self.unit_s, self.plain_s = passes.at(1, 1), passes.at(num_requests, num_requests)
        self.tokens_per_s = num_requests / self.plain_s * max(1.0, self._rate)
        rows = max(4, num_requests)  # one row alone may be the first of a tile
        row_s = (passes.at(num_requests + rows, num_requests) - self.plain_s) / rows
        self.row_price = self.tokens_per_s * row_s
        self._place = min(len(PRICES) - 2, bisect_right(PRICES, self.row_price) - 1)
        low, high = PRICES[self._place], PRICES[self._place + 1]
        self._share = min(1.0, (self.row_price - low) / (high - low))

    def bar(self, chances: list[float]) -> float:
        """The least chance of a batch's paths that are worth their rows: the first n of them, the likeliest first, for
        the n with the largest surplus. Infinite where none is."""
        chances.sort(reverse=True)
        most = tokens = 0.0
        bar, rate, plain_s = math.inf, self.tokens_per_s, self.plain_s
        self.bought = (0, 0.0, 0.0)
        seconds = self.passes.between(self.num_requests + 1, self.num_requests + len(chances), self.num_requests)
        for count, (chance, pass_s) in enumerate(zip(chances, seconds, strict=True), 1):
            tokens += chance
            surplus = tokens - rate * (pass_s - plain_s)
            if surplus > most:
                most, bar, self.bought = surplus, chance, (count, tokens, pass_s - plain_s)
        return bar

    def at_row_price(self, gains: Sequence[float]) -> float:
        """Of gains at PRICES."""
        low = gains[self._place]
        return low + self._share * (gains[self._place + 1] - low)

    def learn_rate(self, tokens: float, seconds: float, num_steps: float) -> None:
        """Of the last steps, so many, all together; tokens per request."""
        kept = 0.5 ** (num_steps / PASSAGE)
        self._rate = kept * self._rate + (1.0 - kept) * tokens * self.plain_s / seconds
