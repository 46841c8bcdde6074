"""What is expected of asking a drafter, how uncertain that is, and the one bucket of time that pays for finding out.

The gain of asking is what the nodes bring beyond the price of their rows, in tokens. It is known for each drafter over
all requests (at several row prices, because those change with the number of users), and for each request from its own
last drafts. How much these say about the next one is learned: copies come in runs, a network's good drafts hardly do.
The older a request's drafts are, the more it is thought to be like any other; the longer a drafter was not asked, the
less is known of it at all. So what was given up looks worth trying again by and by, and there is no state in which a
drafter sleeps, waits or is on trial.

A drafter whose expected gain is worth its time is asked. One whose gain is so uncertain that it may be is asked out of
the bucket, the best upper bound first, and as soon as the bucket holds what that is expected to lose.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.spec.auto.constants import FIRST_SPREAD, LASTING, PASSAGE, SHARE, START, TRIED
from paceline.spec.auto.cost import Market
from paceline.spec.merge.pool import PRICES

LONGEST = 16  # tokens of a draft, each certain: more than those beyond their rows is no drafter's gain


class Expectation(NamedTuple):
    """Of the gain in tokens, if a drafter is asked for one request."""

    request: int  # its index in the step
    mean: float
    most: float  # a standard deviation more


@dataclass(slots=True)
class RequestGain:
    value: float
    step: int
    count: float = 1.0


@dataclass(slots=True)
class Gain:
    """Of one drafter."""

    means: list[float] = field(default_factory=lambda: [0.0] * len(PRICES))
    spread: float = 0.0  # variance of a single draft's gain
    count: float = 0.0  # drafts that this comes from, the old ones counting less
    step: int = 0  # of the last draft
    requests: dict[str, RequestGain] = field(default_factory=dict)
    # Of a request's last drafts and its next one, each less the mean: their product and the square of the former.
    both: float = 0.5
    square: float = 1.0

    def state(self) -> list[float]:
        return [*self.means, self.spread, self.count, self.both / self.square]

    def restore(self, state: Sequence[float]) -> None:
        """What another run showed is soon outweighed."""
        *self.means, self.spread, count, self.both = [max(0.0, one) for one in state]
        self.count = min(count, float(PASSAGE))

    def learn(self, request_id: str, gains: Sequence[float], market: Market, memory: float) -> None:
        """From one draft of a request; its gains at PRICES. `memory`: drafts that the means are taken over."""
        value, mean, step = market.at_row_price(gains), market.at_row_price(self.means), market.step
        self.count = min(LASTING, (self.count if step == self.step else self.known(step)) + 1.0)
        self.step = step
        weight, off = 1.0 / min(self.count, memory), value - mean
        self.spread += weight * (off * off - self.spread)
        self.means = [mean + weight * (gain - mean) for mean, gain in zip(self.means, gains, strict=True)]
        own = self.requests.get(request_id)
        if own is None:
            self.requests[request_id] = RequestGain(value, step)
            return
        before = own.value - mean
        self.both += (before * (value - mean) - self.both) / LASTING
        self.square += (before * before - self.square) / LASTING
        own.count = min(4.0, own.count * 0.5 ** ((step - own.step) / PASSAGE) + 1.0)
        own.value += (value - own.value) / own.count
        own.step = step

    @property
    def pull(self) -> float:
        """How much a request's last drafts say about its next."""
        return max(0.0, min(1.0, self.both / max(self.square, 1e-9)))

    def known(self, step: int) -> float:
        """Drafts that the means count for, by now."""
        return self.count * float(0.5 ** ((step - self.step) / LASTING))

    def expect(self, requests: Sequence[tuple[int, str]], market: Market) -> list[Expectation]:
        """What asking brings, for each of these requests: (index in the step, id)."""
        mean, known, step = market.at_row_price(self.means), self.known(market.step), market.step
        spread = (known * self.spread + FIRST_SPREAD**2 / math.sqrt(known + 1.0)) / (known + 1.0)
        of_mean = spread / (known + 1.0)
        at_best = LONGEST * max(0.0, 1.0 - market.row_price)
        found = []
        for i, request_id in requests:
            own, expected, doubt = self.requests.get(request_id), mean, spread
            if own is not None:
                weight = self.pull * 0.5 ** ((step - own.step) / PASSAGE)
                expected += weight * (own.value - mean)
                doubt *= 1.0 - weight * weight
            found.append(Expectation(i, expected, min(expected + math.sqrt(doubt + of_mean), at_best)))
        return found


@dataclass(slots=True)
class Bucket:
    """Seconds that may be lost on finding out."""

    saved_s: float = 0.0
    run_s: float = 0.0
    lost_s: float = 0.0  # of the run so far, as expected when it was spent
    is_started: bool = False

    def start(self, step_s: float) -> None:
        """With a few steps' time, the first time that it is known."""
        if not self.is_started:
            self.saved_s, self.is_started = self.saved_s + START * step_s, True

    def earn(self, elapsed_s: float, step_s: float) -> None:
        self.run_s += elapsed_s
        # No more is saved than a few steps take: an engine that ran for hours must not spend its share at once.
        self.saved_s = min(self.saved_s + SHARE * elapsed_s, 2.0 * TRIED * step_s)

    def pay(self, seconds: float) -> None:
        self.saved_s -= seconds
        self.lost_s += seconds
