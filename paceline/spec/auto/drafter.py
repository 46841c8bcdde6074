"""One drafter as `auto` sees it: its price, its gain, and the inequality that decided about it last."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.request import Request
from paceline.spec.auto.acceptance import Acceptance
from paceline.spec.auto.constants import PASSAGE
from paceline.spec.auto.cost import DrafterCost
from paceline.spec.auto.explore import Gain
from paceline.spec.auto.memory import numbers
from paceline.spec.proposer import Proposer

FOR_NOW = 1 << 60


@dataclass(slots=True)
class Market:
    """Today's prices."""

    step: int
    num_requests: int  # in the next pass
    unit_s: float  # a pass of one row
    plain_s: float  # the next pass without drafts
    tokens_per_s: float
    row_price: float  # tokens that the time of one more row is worth


class Expectation(NamedTuple):
    """Of the gain in tokens, if it is asked for one request."""

    request: int  # its index in the step
    mean: float
    deviation: float


@dataclass(slots=True)
class Verdict:
    """What was decided about a drafter, in tokens per step."""

    decision: str = "not asked"  # "asked", "tried", "not asked"
    num_requests: int = 0
    gain: float = 0.0  # expected
    most: float = 0.0  # its upper bound
    price: float = 0.0
    seconds: float = 0.0
    tokens_per_s: float = 0.0

    def __str__(self) -> str:
        worth = f"{self.price:.2f} that {1e3 * self.seconds:.2f} ms are worth at {self.tokens_per_s:.0f} tokens/s"
        if self.decision == "asked":
            return f"asked: {self.gain:.2f} tokens expected > {worth}"
        if self.decision == "tried":
            return f"tried: {self.gain:.2f} tokens expected, but it may be {self.most:.2f} > {worth}"
        return f"not asked: {self.gain:.2f} tokens expected < {worth}"


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

    @property
    def watches(self) -> bool:
        """Must it be told of passes to have something to draft from?"""
        return bool(self.proposer.needs.hidden_layers or self.proposer.needs.logits)

    def is_told(self, step: int) -> bool:
        return step <= self.told_until

    def is_ready(self, step: int) -> bool:
        """Without the context of its last passages it drafts badly, and would be judged by that."""
        return not self.watches or (self.is_told(step) and step - self.told_since >= PASSAGE)

    def keep_told(self, step: int, num_steps: int) -> None:
        if not self.is_told(step):
            self.told_since = step
        self.told_until = step + num_steps if self.told_until == FOR_NOW else max(self.told_until, step + num_steps)

    def rule_out(self, step: int) -> None:
        """A trial could not pay at these prices."""
        if self.told_until == FOR_NOW:
            self.told_until = step

    def expectations(self, requests: Sequence[Request], market: Market) -> list[Expectation]:
        """What asking brings, for each request that it can draft for."""
        mean = self.gain.mean(market.row_price)
        of_mean, of_one = self.gain.deviation(market.step)
        found = []
        for i, request in enumerate(requests):
            if self.proposer.can_draft(request):
                expected, deviation = self.gain.expect(request.request_id, mean, of_one, market.step)
                found.append(Expectation(i, expected, (deviation * deviation + of_mean * of_mean) ** 0.5))
        return found

    def forget(self, request_id: str) -> None:
        self.acceptance.forget(request_id)
        self.gain.requests.pop(request_id, None)

    def state(self) -> dict[str, list[float]]:
        """What is kept for the next start."""
        gain = self.gain
        return {
            "acceptance": self.acceptance.estimate.state(),
            "gain": [*gain.means, gain.spread, gain.count],
            "cost": [*self.cost.calls, *self.cost.levels],
            "first_chance": [self.first_chance],
        }

    def restore(self, known: Any) -> None:
        """Nothing of it where anything of it is wrong."""
        if not isinstance(known, dict) or self.num_asked:
            return
        sizes = {name: len(one) for name, one in self.state().items()}
        found = {name: numbers(known.get(name), size) for name, size in sizes.items()}
        acceptance, gain, cost, chance = (found[name] for name in sizes)
        if acceptance is None or gain is None or cost is None or chance is None:
            return
        *means, spread, count = gain
        if min(means) < 0.0 or min(spread, count) < 0.0 or min(cost) < 0.0 or cost[0] <= 0.0 or not 0 <= chance[0] <= 1:
            return
        self.acceptance.estimate.restore(acceptance)
        self.gain.means, self.gain.spread, self.gain.count = means, spread, min(count, float(PASSAGE))
        half = len(cost) // 2
        # A call of the last run weighs as much as one call of this one.
        self.cost.calls = [one / cost[0] for one in cost[:half]]
        self.cost.levels = [one / max(cost[half], 1e-9) for one in cost[half:]]
        self.cost.num_learned = 1
        self.first_chance = chance[0]

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
