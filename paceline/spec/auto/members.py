"""Which members `auto` asks: one account for each, in seconds.

A member that is asked brings what its accepted tokens would have cost without it, and takes its own time and that of
its nodes' rows, all as measured. The difference goes to its account, together with `ALLOWANCE` of all time:

    trial     it is asked, for all requests, until `STAKE` tokens' time is gained (then it pays) or lost, or
              1 / `ALLOWANCE` steps are over
    pays      it is asked as long as there is something in the account, which holds `HOLD` stakes at most
    skipped   until the allowance has made good what it lost. It costs nothing: it is told of no step, and what it alone
              needs is not computed
    observes  for some steps before its next trial, so that it has something to draft from
    cheap     nothing is kept for it, and it takes less time for a request than a row of the pass does: it is asked
              request by request, as the controller decides. One that becomes slow is on trial, with that step's debt
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.core.tree import DraftTree
from paceline.lab.slope import Slope
from paceline.spec.auto.reasons import Inequality, Reason
from paceline.spec.merge.usefulness import Usefulness
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, union

MARGIN = 1.1  # drafts must be expected to save so many times what they cost: estimates err
ALLOWANCE = 0.004  # share of the elapsed time that may be lost in finding out whether drafts pay
RATE = 0.1  # weight of the newest value in running averages
STAKE = 16.0  # tokens whose time a trial may lose, or gain
HOLD = 4.0  # stakes that a member that pays may have in hand: text comes in phases, and one bad phase says little
NEXT_CHANCE = 0.7  # that the token after a likely path is drafted right
ASKED = ("trial", "pays")  # states, of members that are asked for all requests
KEPT = ("state", "balance_s", "price_s", "level_s", "next_chance", "levels")  # of a member, for the next start
DECISIONS = {"skipped": "off", "observes": "off, trial soon", "trial": "on trial", "pays": "on"}  # and in words


@dataclass(slots=True)
class Member:
    needs: Needs
    can_stop: bool  # where a path is no longer likely. One that samples its drafts must not: it would bias them
    state: str = "trial"
    balance_s: float = 0.0  # of its account
    price_s: float = 0.0  # of a step in which it is asked, for each request
    level_s: float = 0.0  # of a level of drafting, for all requests
    levels: int = 1  # that it drafts, where it is a model and runs once for each
    costs: Slope = field(default_factory=Slope)  # of seconds over levels: `level_s`
    next_chance: float = 0.0  # that its token is right if the one before is
    num_judged: int = 0  # steps, since its trial began
    spent_s: float = 0.0  # since the last step was judged
    asked_before: int = 0  # times, when it was
    judged: Inequality = field(default_factory=Inequality)  # both sides of the profit, for people to read

    @property
    def reason(self) -> Reason:
        return self.judged.reason(DECISIONS[self.state], None if self.state == "trial" else self.state == "pays")


class MemberChoice(Usefulness):
    """Takes the place of merge's own judgement, because the controller knows what rows and tokens cost."""

    def __init__(self, members: Mapping[str, Proposer]) -> None:
        super().__init__(list(members))
        self.members = {name: Member(member.needs, member.keeps_min_prob) for name, member in members.items()}
        self.min_probs = (0.0, 0.0)  # Budget's: of a path worth its row, and of one worth another level
        self.cheap_s = self.batch_s = 0.0  # host time of this step that cheap members took, and others
        self.skips_cheap = False  # are the cheap members asked for no request now?
        self.not_due: Set[int] = frozenset()  # positions of requests for which the cheap members are not asked now
        self._cheap_tokens = 0.0  # that the cheap members bring, per request and step
        self._stake_s = 0.0  # what `STAKE` tokens take plainly
        self._drafted: dict[str, tuple[int, float]] = {}  # member -> depth of what it drafted last, and its chance
        self._settle()

    def learned(self) -> dict[str, Any]:
        """Of each account a stake at most, on either side."""
        found = {}
        for name, member in self.members.items():
            figures = {field: getattr(member, field) for field in KEPT} | {"judged": asdict(member.judged)}
            found[name] = figures | {"balance_s": min(self._stake_s, max(-self._stake_s, member.balance_s))}
        return found

    def begin_with(self, learned: Mapping[str, Any]) -> None:
        """Each goes on trial with half of what an earlier start left in its account: one that paid drafts from the
        first step on, one that lost has half of a trial left, for what it lost on another text says little."""
        for name, figures in learned.items():
            member = replace(self.members[name], **figures | {"judged": Inequality(**figures["judged"])}, num_judged=1)
            if member.state != "cheap":
                member.state, member.balance_s = "trial", member.balance_s / 2
            self.members[name] = member
        self._settle()

    def spend(self, member: str, seconds: float) -> None:
        super().spend(member, seconds)
        self.members[member].spent_s += seconds
        if self.members[member].state == "cheap":
            self.cheap_s += seconds
        else:
            self.batch_s += seconds

    def charge(self, seconds: float) -> None:
        """Time spent for the members that are asked for all requests, though not by them: shared like their own."""
        asked = [member for member in self.members.values() if member.state in ASKED]
        own_s = sum([member.spent_s for member in asked])
        for member in asked:
            member.spent_s *= 1.0 + seconds / (own_s or math.inf)

    def stop_at(self, bar: float, token_s: float) -> None:
        """`bar`: the chance from which on a node is worth its row. A path goes on only where what probably follows is
        worth another level of drafting too; `token_s`: what as many tokens as there are requests cost."""
        level_s = max([member.level_s for member in self.members.values() if member.state in ASKED], default=0.0)
        self.min_probs = min(NEXT_CHANCE, bar), min(NEXT_CHANCE, (bar + level_s / token_s) / NEXT_CHANCE)

    def only_cheap(self, tree: DraftTree, nodes: Sequence[int]) -> list[int]:
        """Those of the nodes that none but cheap members drafted: the others would be there without them."""
        cheap = {name for name, member in self.members.items() if member.state == "cheap"}
        return [node for node in nodes if tree.members is not None and cheap.issuperset(tree.members[node])]

    def report(self, cheap: Reason) -> dict[str, Any]:
        """Member -> asked now or not, why, and its figures. `cheap`: what decides about those, together."""
        return {
            name: {
                "asked": account.is_used,
                "state": member.state,
                "num_asked": account.num_asked,
                "seconds": account.total_s,
                "balance_s": member.balance_s,
                **(cheap if member.state == "cheap" else member.reason).figures(name),
            }
            for (name, account), member in zip(self.accounts.items(), self.members.values(), strict=True)
        }

    def begin_step(self, elapsed_s: float) -> None:
        """Before an evaluated step. `elapsed_s`: since the one before."""
        for member in self.members.values():
            member.balance_s += ALLOWANCE * elapsed_s
            if member.state == "observes":
                member.state, member.balance_s, member.num_judged = "trial", 0.0, 0
            elif member.state == "skipped" and member.balance_s >= 0.0:
                member.state = "observes"
        self._settle()

    def _settle(self) -> None:
        """Which members are asked, from now on."""
        states = {name: member.state for name, member in self.members.items()}
        asked = [name for name, state in states.items() if state in ASKED]
        for name, state in states.items():
            self.accounts[name].is_used = state in (*ASKED, "cheap")
        self.needs = union([member.needs for member in self.members.values() if member.state != "skipped"])
        self.has_trial, self.has_cheap = "trial" in states.values(), "cheap" in states.values()
        self.asks_batch = bool(asked)  # is a member asked for all requests?
        self.all_skipped = all(state in ("skipped", "cheap") for state in states.values())  # but for cheap ones
        # The only one, if it pays and can be given thresholds.
        alone = len(asked) == 1 and not self.has_trial and self.members[asked[0]].can_stop
        self.pays_alone: str | None = asked[0] if alone else None

    def budgets(self, member: str, budgets: list[Budget]) -> list[Budget]:
        """A cheap member drafts for the requests that are due; a model as many levels as pay."""
        one = self.members[member]
        if one.state == "cheap":
            return [Budget(0, 0) if i in self.not_due else budget for i, budget in enumerate(budgets)]
        if one.needs.lookahead_slots:
            return [budget._replace(max_depth=min(budget.max_depth, one.levels)) for budget in budgets]
        return budgets

    def worth_asking(self) -> list[str]:
        states = ASKED if self.skips_cheap else (*ASKED, "cheap")
        self._asked = [name for name, member in self.members.items() if member.state in states]
        for name in self._asked:
            self.accounts[name].num_asked += 1
        return self._asked

    def ask_none(self) -> None:
        self._asked = []

    def is_told(self, member: str) -> bool:
        """A cheap member is told of steps in which it was asked, another one of all steps unless it is skipped."""
        state = self.members[member].state
        return member in self._asked if state == "cheap" else state != "skipped"

    def record(self, hits: Sequence[Sequence[str]], num_tokens: int) -> None:
        """Merge judges what was drafted. Here nothing is done: `judge` counts what was offered."""

    def expect(self, trees: Sequence[DraftTree], chances: Sequence[Sequence[float]]) -> None:
        """What was drafted for the next pass: how deep each member went, and how likely its longest paths are."""
        found: dict[str, list[tuple[int, float]]] = {}
        for tree, chance in zip(trees, chances, strict=True):
            deepest = {name: node for node, names in enumerate(tree.members or ()) for name in names}
            for name, node in deepest.items():
                found.setdefault(name, []).append((len(tree.ancestors(node)), chance[node]))
        self._drafted = {name: (max(of)[0], sum([chance for _, chance in of]) / len(of)) for name, of in found.items()}

    def judge(self, passes: Sequence[RequestPass], token_s: float, row_s: float, num_cheap_asked: int) -> None:
        """`token_s`: what a token costs plainly; `row_s`: what one more row costs."""
        num_rows, num_tokens = self._count(passes)
        num_requests = max(1, len(passes))
        num_cheap = sum([num_tokens[name] for name, member in self.members.items() if member.state == "cheap"])
        self._cheap_tokens += RATE * (num_cheap / num_requests - self._cheap_tokens)
        self._stake_s = STAKE * token_s
        worth_s = token_s / (1.0 + self._cheap_tokens)  # what a token costs with the cheap members alone
        for name, member in self.members.items():
            spent_s, num_steps = self._take_time(name)
            if name not in self._asked:
                member.balance_s -= spent_s if member.state not in ASKED else 0.0  # else it would have been, this once
                continue
            cost_s = spent_s / num_steps
            is_cheap = member.state == "cheap"
            member.num_judged += 1
            weight = max(min(1.0, RATE * num_steps), 1.0 / member.num_judged)
            member.price_s += weight * (cost_s / max(1, num_cheap_asked if is_cheap else num_requests) - member.price_s)
            if member.needs == Needs() and is_cheap != (member.price_s < max(row_s, ALLOWANCE * token_s)):
                member.state, member.balance_s = ("trial", -spent_s) if is_cheap else ("cheap", 0.0)
            elif not is_cheap:
                price_s = cost_s + num_rows[name] * row_s
                member.judged.learn(RATE, num_tokens[name], price_s, worth_s)
                member.balance_s += num_tokens[name] * worth_s - price_s
                self._learn_levels(name, weight, cost_s, row_s / worth_s, worth_s * num_requests)
                self._decide(member, self._stake_s)
        self._settle()

    @staticmethod
    def _decide(member: Member, stake_s: float) -> None:
        if member.balance_s >= stake_s:
            member.state, member.balance_s = "pays", min(member.balance_s, HOLD * stake_s)
        elif member.balance_s < (0.0 if member.state == "pays" else -stake_s):
            member.state = "skipped"
        elif member.state == "trial" and member.num_judged > 1.0 / ALLOWANCE:
            member.state, member.balance_s = "skipped", -stake_s  # too little: what is kept for it costs too

    def _learn_levels(self, name: str, weight: float, cost_s: float, row: float, tokens_s: float) -> None:
        """A level of a model is worth it iff the chance that a path of so many tokens is accepted is above what the
        level's time, and its row's, is worth in tokens: the rule of nodes. Each token as likely as those so far."""
        depth, chance = self._drafted.get(name, (0, 0.0))
        if not depth:
            return
        member = self.members[name]
        member.level_s = member.costs.learn(weight, depth, cost_s)
        member.next_chance += weight * (chance ** (1.0 / depth) - member.next_chance)
        price, path, member.levels = row + member.level_s / tokens_s, member.next_chance**2, 1
        while member.levels < member.needs.lookahead_slots and path > price:
            path, member.levels = path * member.next_chance, member.levels + 1

    def skip_evaluation(self) -> None:
        """A step that read prompts and says nothing about drafts."""
        for name, member in self.members.items():
            spent_s, _ = self._take_time(name)
            if member.state in ("trial", "observes"):
                member.balance_s -= spent_s

    def _take_time(self, name: str) -> tuple[float, int]:
        """What it took since this was last asked, and in how many steps it was asked, one at least."""
        member, num_asked = self.members[name], self.accounts[name].num_asked
        spent_s, num_steps = member.spent_s, max(1, num_asked - member.asked_before)
        member.spent_s, member.asked_before = 0.0, num_asked
        return spent_s, num_steps

    def _count(self, passes: Sequence[RequestPass]) -> tuple[dict[str, int], dict[str, int]]:
        """Member -> its nodes that were verified, and those of them whose tokens joined the output. A node that several
        drafted counts for a cheap one, or else for the most profitable: of two that draft the same one is kept."""
        num_rows, num_tokens = dict.fromkeys(self.members, 0), dict.fromkeys(self.members, 0)
        place = {name: (m.state != "cheap", -m.balance_s) for name, m in self.members.items()}
        for verified in passes:
            owners = [min(names, key=place.__getitem__) for names in verified.draft.members or ()]
            for owner in owners:
                num_rows[owner] += 1
            for node in verified.accepted[: len(verified.new_token_ids)]:
                num_tokens[owners[node]] += 1
        return num_rows, num_tokens
