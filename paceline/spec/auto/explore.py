"""What is expected of asking a drafter, how uncertain that is, and the one bucket of time that pays for finding out.

The gain of asking is what the nodes bring beyond the price of their rows, in tokens: the sum of (chance - row price)
over the nodes worth their rows. It is known for each drafter over all requests (at several row prices, because those
change with the number of users), and for each request from its own last drafts. The older a request's drafts are, the
more it is thought to be like any other; the longer a drafter was not asked, the less is known of it at all. So what was
given up looks worth trying again by and by, and there is no state in which a drafter sleeps, waits or is on trial.

A drafter whose expected gain is worth its time is asked. One whose gain is so uncertain that it may be is asked out of
the bucket, the best upper bound per second first, and as soon as the bucket holds what that is expected to lose.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.spec.auto.constants import FIRST_SPREAD, LASTING, PASSAGE, SHARE, START_S, START_SHARE, TRIED

ROW_PRICES = (0.0, 0.1, 0.3, 0.6, 1.0)  # in tokens, at which gains are known; between them straight lines


@dataclass(slots=True)
class RequestGain:
    value: float
    step: int
    count: float = 1.0


@dataclass(slots=True)
class Gain:
    """Of one drafter."""

    means: list[float] = field(default_factory=lambda: [0.0] * len(ROW_PRICES))
    spread: float = 0.0  # variance of a single draft's gain
    count: float = 0.0  # drafts that this comes from, the old ones counting less
    step: int = 0  # of the last draft
    requests: dict[str, RequestGain] = field(default_factory=dict)

    def restore(self, known: Sequence[float]) -> None:
        *self.means, self.spread, count = known
        self.count = min(count, float(PASSAGE))  # what another run showed is soon outweighed

    def learn(self, gain_at: Callable[[float], float], gain: float, row_price: float, step: int, is_new: bool) -> None:
        """From one draft of any request, of which the gain is known at each row price; `gain` is that at the present
        one. `is_new`: so is its drafter, and what its last drafts were thought to bring is soon out of date."""
        self.count = min(PASSAGE if is_new else LASTING / 2, self.known(step) + 1.0)
        self.step = step
        weight = 1.0 / self.count
        off = gain - self.mean(row_price)
        self.spread += weight * (off * off - self.spread)
        for i, price in enumerate(ROW_PRICES[:-1]):
            self.means[i] += weight * (gain_at(price) - self.means[i])

    def learn_of(self, request_id: str, value: float, step: int) -> None:
        """The gain of this request's newest draft."""
        own = self.requests.get(request_id)
        if own is None:
            self.requests[request_id] = RequestGain(value, step)
            return
        own.count = min(4.0, own.count * 0.5 ** ((step - own.step) / PASSAGE) + 1.0)
        own.value += (value - own.value) / own.count
        own.step = step

    def mean(self, row_price: float) -> float:
        """Of any request."""
        if row_price >= 1.0:
            return 0.0
        right = next(i for i, price in enumerate(ROW_PRICES) if price > row_price)
        left_price, right_price = ROW_PRICES[right - 1], ROW_PRICES[right]
        share = (row_price - left_price) / (right_price - left_price)
        return self.means[right - 1] + share * (self.means[right] - self.means[right - 1])

    def known(self, step: int) -> float:
        """Drafts that the means count for, by now."""
        return self.count * float(0.5 ** ((step - self.step) / LASTING))

    def deviation(self, step: int) -> tuple[float, float]:
        """Of the mean, and of a single request from it."""
        known = self.known(step)
        spread = (known * self.spread + FIRST_SPREAD**2) / (known + 1.0)
        return math.sqrt(spread / (known + 1.0)), math.sqrt(spread)

    def expect(self, request_id: str, mean: float, deviation: float, step: int) -> tuple[float, float]:
        """What asking for this request brings, and its standard deviation; given those of any request."""
        own = self.requests.get(request_id)
        if own is None:
            return mean, deviation
        weight = own.count / (own.count + 1.0) * 0.5 ** ((step - own.step) / PASSAGE)
        return mean + weight * (own.value - mean), deviation * math.sqrt(1.0 - weight * weight)


@dataclass(slots=True)
class Bucket:
    """Seconds that may be lost on finding out."""

    saved_s: float = START_SHARE * START_S
    run_s: float = 0.0
    lost_s: float = 0.0  # of the run so far, as expected when it was spent

    def earn(self, elapsed_s: float, step_s: float) -> None:
        self.run_s += elapsed_s
        self.saved_s += SHARE * elapsed_s
        # No more is saved than a few steps take: an engine that ran for hours must not spend its share at once.
        self.saved_s = min(self.saved_s, max(START_SHARE * START_S, 2.0 * TRIED * step_s))

    def pay(self, seconds: float) -> None:
        self.saved_s -= seconds
        self.lost_s += seconds
