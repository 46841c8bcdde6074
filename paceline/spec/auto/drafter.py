"""One drafter as `auto` sees it: its price, its gain, and the inequality that decided about it last."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.request import Request
from paceline.lab.live_acceptance import Acceptance
from paceline.lab.live_call_cost import CallCostModel
from paceline.spec.auto.constants import FEW_NODES, LASTING, PASSAGE
from paceline.spec.auto.cost import Market
from paceline.spec.auto.explore import Expectation, Gain
from paceline.spec.kept_state import Keeps
from paceline.spec.proposer import Proposer


class Verdict(NamedTuple):
    """What was decided about a drafter, in tokens per step."""

    decision: str = "not asked"  # "asked", "tried", "not asked"
    gain: float = 0.0  # expected
    most: float = 0.0  # its upper bound
    seconds: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def price(self) -> float:
        return self.seconds * self.tokens_per_s

    def __str__(self) -> str:
        if not self.tokens_per_s:
            return "not asked: nothing to draft from so far"
        worth = f"{self.price:.2f} that its {1e3 * self.seconds:.2f} ms are worth at {self.tokens_per_s:.0f} tokens/s"
        if self.decision == "tried":
            return f"tried: {self.gain:.2f} tokens expected, but it may be {self.most:.2f}, against {worth}"
        pays = self.gain > self.price
        late = ", but it has to be told of some passes first" if pays and self.decision == "not asked" else ""
        return f"{self.decision}: {self.gain:.2f} tokens expected {'>' if pays else '<'} {worth}{late}"


NOT_PLANNED = Verdict()


@dataclass(slots=True)
class Drafter:
    name: str
    proposer: Proposer
    acceptance: Acceptance = field(default_factory=Acceptance)
    cost: CallCostModel = field(default_factory=CallCostModel)
    gain: Gain = field(default_factory=Gain)
    num_asked: int = 0  # steps
    is_asked: bool = False  # in the last step
    verdict: Verdict = NOT_PLANNED  # of the last plan
    # The plan for this step and the next few
    able: list[int] = field(default_factory=list)  # requests, by index in the step, that it can draft for
    expected: list[Expectation] = field(default_factory=list)  # of those
    asked: list[Expectation] = field(default_factory=list)  # those that it is asked for in every step
    tried: list[Expectation] = field(default_factory=list)  # and those out of the bucket, in the plan's first step
    call_s: float = 0.0
    each_s: float = 0.0
    limits: tuple[int, float, float] = (0, 0.0, 0.0)  # few nodes, Budget's min_prob_to_extend, and a gain that is much
    # One that must be told of passes to have something to draft from is told from the start, because a prompt is seen
    # only once.
    watches: bool = False
    is_told: bool = True
    told_since: int = -PASSAGE  # step
    told_until: int = 2 * PASSAGE
    tried_until: int = -1  # step up to which it is tried out of the bucket
    told_s: float = 0.0  # what telling it of a pass takes, lately

    def __post_init__(self) -> None:
        self.watches = bool(self.proposer.needs.hidden_layers or self.proposer.needs.logits)

    @property
    def memory(self) -> float:
        """Drafts that its gain is averaged over. As long as little is known of what is accepted, what they were thought
        to bring is soon out of date."""
        return PASSAGE if self.acceptance.num_known < LASTING else LASTING / 8

    def is_ready(self, step: int) -> bool:
        """Without the context of the last passage it drafts badly, and would be judged by that."""
        return not self.watches or (self.is_told and step - self.told_since >= PASSAGE)

    def keep_told(self, step: int, num_steps: int) -> None:
        if not self.is_told:
            self.is_told, self.told_since = True, step
        self.told_until = max(self.told_until, step + num_steps)

    def find_able(self, requests: Sequence[Request]) -> bool:
        """For which of them it can draft at all, if any."""
        can_draft = self.proposer.can_draft
        self.able = [i for i, request in enumerate(requests) if can_draft(request)]
        self.verdict = self.verdict if self.able else NOT_PLANNED
        return bool(self.able)

    def plan(self, names: Sequence[str], market: Market) -> None:
        """What is expected of it, and whom it is asked for: where gains are worth the seconds, of each and of all."""
        rate = market.tokens_per_s
        self.expected = self.gain.expect([(i, names[i]) for i in self.able], market)
        self.call_s, self.each_s = self.cost.parts(market.unit_s)
        self.asked = self.worth_asking(None, rate)
        # A path goes on where what follows is worth a row, and a level of drafting. Where a request's last drafts
        # brought little, more than a few nodes are not worth rating.
        row_price = min(0.9, market.row_price)
        level = rate * self.cost.level_s(1, market.unit_s)
        further = self.acceptance.least_said(min(0.9, 2.0 * (row_price + level)))
        self.limits = max(1, round(FEW_NODES * (1.0 - row_price))), further, 2.0 * (1.0 - row_price)
        self.note("asked" if self.asked else "not asked", self.asked or self.expected, rate)

    def worth_asking(self, rest: Sequence[float] | None, rate: float) -> list[Expectation]:
        """The rule. `rest`: by request, the chance that no drafter asked before has its next token."""
        price = rate * self.each_s
        surplus = -rate * self.call_s
        worth = []
        for one in self.expected if rest is None else self.asked:
            gain = one.mean if rest is None else one.mean * rest[one.request]
            if gain > price:
                surplus += gain - price
                worth.append(one)
        return worth if surplus > 0.0 and self.cost.num_learned > 1 else []  # before, its price is not known

    def note(self, decision: str, asked: Sequence[Expectation], rate: float) -> None:
        gain, most = sum([one.mean for one in asked]), sum([one.most for one in asked])
        self.verdict = Verdict(decision, gain, most, self.call_s + self.each_s * len(asked), rate)

    def forget(self, request_id: str) -> None:
        self.gain.requests.pop(request_id, None)

    @property
    def kept(self) -> dict[str, Keeps]:
        """For the next start."""
        return {"acceptance": self.acceptance, "gain": self.gain, "cost": self.cost}

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
