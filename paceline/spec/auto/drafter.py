"""One drafter as `auto` sees it: its price, its gain, and the inequality that decided about it last."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.request import Request
from paceline.spec.auto.acceptance import Acceptance
from paceline.spec.auto.constants import PASSAGE
from paceline.spec.auto.cost import DrafterCost, Market
from paceline.spec.auto.explore import Gain
from paceline.spec.kept_state import numbers
from paceline.spec.proposer import Proposer

FOR_NOW = 1 << 60  # no step comes later
LONGEST = 16  # tokens of a draft, each certain: more than a row's price is no drafter's gain


class Expectation(NamedTuple):
    """Of the gain in tokens, if it is asked for one request."""

    request: int  # its index in the step
    mean: float
    most: float  # a standard deviation more


class Verdict(NamedTuple):
    """What was decided about a drafter, in tokens per step."""

    decision: str = "not asked"  # "asked", "tried", "not asked"
    num_requests: int = 0
    gain: float = 0.0  # expected
    most: float = 0.0  # its upper bound
    seconds: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def price(self) -> float:
        return self.seconds * self.tokens_per_s

    def __str__(self) -> str:
        worth = f"{self.price:.2f} that its {1e3 * self.seconds:.2f} ms are worth at {self.tokens_per_s:.0f} tokens/s"
        if self.decision == "tried":
            return f"tried: {self.gain:.2f} tokens expected, but it may be {self.most:.2f}, against {worth}"
        return f"{self.decision}: {self.gain:.2f} tokens expected {'>' if self.decision == 'asked' else '<'} {worth}"


@dataclass(slots=True)
class Drafter:
    name: str
    proposer: Proposer
    acceptance: Acceptance = field(default_factory=Acceptance)
    cost: DrafterCost = field(default_factory=DrafterCost)
    gain: Gain = field(default_factory=Gain)
    verdict: Verdict = field(default_factory=Verdict)
    first_chance: float = 0.5  # that its first token is right, lately
    told_s: float = 0.0  # what telling it of the last pass took
    # From the start, because a prompt is seen only once, and until it is clear that a trial is out of the question:
    told_since: int = -PASSAGE  # step
    told_until: int = FOR_NOW
    paid_until: int = -1  # step up to which it is tried out of the bucket
    num_asked: int = 0  # steps

    watches: bool = False  # must it be told of passes to have something to draft from?

    def __post_init__(self) -> None:
        self.watches = bool(self.proposer.needs.hidden_layers or self.proposer.needs.logits)

    def is_told(self, step: int) -> bool:
        return step <= self.told_until

    def is_ready(self, step: int) -> bool:
        """Without the context of the last passage it drafts badly, and would be judged by that."""
        return not self.watches or (self.is_told(step) and step - self.told_since >= PASSAGE)

    def keep_told(self, step: int, num_steps: int) -> None:
        if not self.is_told(step):
            self.told_since = step
        self.told_until = step + num_steps if self.told_until == FOR_NOW else max(self.told_until, step + num_steps)

    def expectations(self, requests: Sequence[Request], market: Market) -> list[Expectation]:
        """What asking brings, for each request that it can draft for."""
        mean = self.gain.mean(market.row_price)
        of_mean, of_one = self.gain.deviation(market.step)
        at_best = max(0.0, 1.0 - market.row_price) * LONGEST
        least = of_mean * of_mean
        of_new = mean, min(mean + math.sqrt(of_one * of_one + least), at_best)  # of a request without drafts so far
        found, known, can_draft = [], self.gain.requests, self.proposer.can_draft
        for i, request in enumerate(requests):
            if can_draft(request):
                if request.request_id not in known:
                    found.append(Expectation(i, *of_new))
                    continue
                expected, deviation = self.gain.expect(request.request_id, mean, of_one, market.step)
                most = expected + math.sqrt(deviation * deviation + least)
                found.append(Expectation(i, expected, min(most, at_best)))
        return found

    def forget(self, request_id: str) -> None:
        self.acceptance.forget(request_id)
        self.gain.requests.pop(request_id, None)

    def state(self) -> dict[str, list[float]]:
        """What is kept for the next start."""
        return {
            "acceptance": self.acceptance.estimate.state(),
            "gain": [*self.gain.means, self.gain.spread, self.gain.count],
            "cost": [*self.cost.calls, *self.cost.levels],
            "first_chance": [self.first_chance],
        }

    def restore(self, known: Any) -> None:
        """Nothing of it where anything of it is wrong."""
        if not isinstance(known, dict):
            return
        found = [numbers(known.get(name), len(one)) for name, one in self.state().items()]
        acceptance, gain, cost, first = found
        if acceptance is None or gain is None or cost is None or first is None:
            return
        if min(*gain, *cost, *first, 1.0 - first[0]) < 0.0 or min(cost[0], cost[5]) <= 0.0:
            return
        self.acceptance.estimate.restore(acceptance)
        self.gain.restore(gain)
        self.cost.restore(cost)
        self.first_chance = first[0]

    def report(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "asked": verdict.decision != "not asked",
            "state": verdict.decision,
            "num_asked": self.num_asked,
            "gain_tokens": verdict.gain,
            "price_tokens": verdict.price,
            "price_s": verdict.seconds,
            "reason": str(verdict),
        }
