"""Which members `auto` asks: the cheap ones always, an expensive one only as long as it gains time.

A member that reads logits or hidden states, or writes KV while it drafts, takes time for every row or level: it is
expensive, and must gain more than that. Its profit in a step is what the tokens that it brought would have cost
plainly, less the rows of its own nodes, less its own time, all as measured.

Where the cheap members bring tokens of their own, a token costs less to begin with. A node that a cheap member or a
more profitable one drafted too counts for that one: of two expensive members that draft the same, one is kept, not
none.

    skipped  -> observes   when its next trial is due, or at once when the batch has become much smaller; not while the
                           cheap members bring so many tokens that there is little left to gain, nor where even good
                           drafts would gain less than a trial must
    observes -> trial      after some steps: it has seen enough to draft from
    trial    -> pays, or skipped, as soon as its profit is clearly above or below zero
    pays     -> skipped    when its profit is clearly below zero
             -> observes   instead of skipped where it usually pays, for a little longer each time

A skipped member costs nothing: it observes no step, and what it alone needs is not computed. After each trial that
loses, the next one comes later, so that all trials together take a small share of the time.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.tree import DraftTree
from paceline.spec.auto.levels import Levels
from paceline.spec.auto.reasons import Inequality, Reason
from paceline.spec.merge.usefulness import Usefulness
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, union

TRIAL_STEPS, TRIAL_REQUESTS = 64, 2  # at most
LOSS_ERRORS = 2.5  # standard errors by which the profit of a trial must be below zero to end it early
# What a trial must gain: this share of a step's time; before its end by so many standard errors, after so many steps.
# A smaller gain is hard to tell from a loss.
WORTHWHILE, GAIN_ERRORS, GAIN_STEPS = 0.03, 1.5, 12
STILL_WORTHWHILE = 0.01  # of a step's time: what a member that pays must go on gaining
GAIN_SHARE = 0.96  # of what a member's tokens save; the rest covers costs not measured, such as keeping hidden states
PRIOR_SPREAD = 0.5  # tokens per step, at least: after a few steps without tokens the next may bring many
LONG_ENOUGH = 24  # steps after which too small a profit counts as a loss, where it has been that for long
ENOUGH_CHEAP_TOKENS = 1.0  # accepted per request and step: an expensive member has little left to gain
LEAST_STEPS = 4  # judged before any verdict
NO_BUDGET = Budget(0, 0)
UNJUDGED = Inequality().reason("on", True)
ASKED = ("trial", "pays")  # states
DECISIONS = {"skipped": "off", "observes": "off, trial soon", "trial": "on trial", "pays": "on"}  # and in words
OBSERVE_STEPS = 12  # before a trial, for a member that was skipped
WARM_UP_STEPS = 2  # of a trial, not judged
PAYS_STEPS = 24.0  # evaluated ones, over which a member that pays is judged
MEMORY_STEPS = 16.0  # and over which the steps themselves are averaged
EXPECTED_SHARE = 0.75  # weight of the expected tokens in a verdict: those accepted in one step are mostly chance
FIRST_PAUSE, LONGEST_PAUSE = 96, 2048  # steps between two trials
TYPICAL_STEPS = 128.0  # over which the long-time profit is averaged
FIRST_BREAK, LONGEST_BREAK = 16, 128  # steps that a member which usually pays is not asked, but observes
KNOWN_STEPS = 32  # judged before the long-time profit is used
MOST_SKIPPED = 32  # steps of a trial that read prompts too: then it ends, without a verdict
GROWING_SHARE = 0.35  # of the time that a trial takes, at least, grows with the requests
FEWER = 4  # times fewer requests than in the last trial: a new trial begins at once
# Share of a token's time that a level of drafting takes, about; how often the next token is drafted right, typically;
# and the chance from which on a path is always continued.
LEVEL_SHARE, NEXT_CHANCE, MOST_LIKELY = 0.08, 0.7, 0.7
# Of the elapsed time: what losing trials may take; and the most, where even the longest pause is too short for that.
TRIAL_SHARE, MOST_TRIAL_SHARE = 0.005, 0.01


@dataclass(slots=True)
class ExpensiveMember:
    """What is known of a member that costs time."""

    state: str = "observes"  # "skipped", "observes", "trial" or "pays"
    profit_s: float = 0.0  # per step in which it was asked, lately
    spread: float = 0.0  # its variance
    typical_s: float = 0.0  # the profit over a long time
    spent_s: float = 0.0  # since the last step was judged
    least_s: float = math.inf  # host time of a step in which a few requests were asked, the least so far
    cost_s: float = 0.0  # the same, after a trial that lost: what it costs at least
    lost_s: float = 0.0  # by this trial and by observing before it, as measured
    num_judged: int = 0  # steps of this trial, or since it ended
    num_skipped: int = 0  # steps of this trial that were not judged: the first ones, and those that read prompts
    num_to_observe: int = 0  # steps that it observes before it is asked
    next_trial: int = 0  # step
    pause: int = FIRST_PAUSE  # steps, after the next trial that loses
    break_steps: int = FIRST_BREAK  # the next time that it observes instead of being skipped
    num_known: int = 0  # steps that the long-time profit comes from
    tried_with: int = 0  # requests in the batch of the last trial
    judged: Inequality = field(default_factory=Inequality)  # both sides of the profit, for people to read
    levels: Levels | None = None  # of a model, which runs once for every level
    at_best: Inequality | None = None  # where even good drafts would not pay: that, instead

    @property
    def is_asked(self) -> bool:
        return self.state in ASKED

    @property
    def reason(self) -> Reason:
        """What decided about it."""
        if self.at_best is not None:
            return self.at_best.reason("off", False, "at best")
        return self.judged.reason(DECISIONS[self.state], None if self.state == "trial" else self.state == "pays")

    def begin(self, state: str) -> None:
        self.state, self.num_judged, self.num_skipped = state, 0, 0

    def learn(self, gain: float, price_s: float, worth_s: float) -> None:
        """What it brought in tokens, its time and its rows' time, and what a token costs without it."""
        weight = 1.0 / self._num_remembered
        self.judged.learn(weight, gain, price_s, worth_s)
        profit_s = gain * worth_s - price_s
        off_s = profit_s - self.profit_s
        self.profit_s += weight * off_s
        self.spread = (1.0 - weight) * (self.spread + weight * off_s * off_s)
        self.num_known += 1
        self.typical_s += (profit_s - self.typical_s) / min(self.num_known, TYPICAL_STEPS)

    def usually_gains(self, least_s: float) -> bool:
        return self.num_known >= KNOWN_STEPS and self.typical_s > least_s

    def standard_error_s(self, spread_s: float) -> float:
        """Standard error of the profit, which comes from few steps."""
        spread = max(self.spread, (PRIOR_SPREAD * spread_s) ** 2)
        return math.sqrt(spread / self._num_remembered)

    @property
    def _num_remembered(self) -> float:
        return max(1.0, min(self.num_judged, TRIAL_STEPS if self.state == "trial" else PAYS_STEPS))


class Brought(NamedTuple):
    """By a member in a step."""

    gain: float  # tokens
    num_rows: int  # its nodes
    row_s: float
    cost_s: float  # its own time
    worth_s: float  # what a token costs without it
    deepest: float | None  # mean chance of the deepest nodes that it drafted


class MemberChoice(Usefulness):
    """Takes the place of merge's own judgement, because the controller knows what rows and tokens cost."""

    def __init__(self, members: Mapping[str, Proposer]) -> None:
        super().__init__(list(members))
        self.expensive = {
            name: ExpensiveMember()
            for name, member in members.items()
            if member.needs.logits or member.needs.hidden_layers or member.needs.lookahead_slots
        }
        self._cheap_needs = union([member.needs for name, member in members.items() if name not in self.expensive])
        self._needs_of = {name: members[name].needs for name in self.expensive}
        for name, member in self.expensive.items():
            if self._needs_of[name].lookahead_slots:  # as many as a path may have tokens
                member.levels = Levels(self._needs_of[name].lookahead_slots)
        # Those that stop where a path is no longer likely. One that samples its drafts must not: it would bias them.
        self._stoppable = {name for name in self.expensive if members[name].keeps_min_prob}
        self.min_probs = (0.0, 0.0)  # Budget's: of a path worth its row, and of one worth another level
        self._needs: dict[tuple[str, ...], Needs] = {}  # expensive members not skipped -> what all members need
        self._step = 0
        self.has_trial = self.pays = (
            False  # is an expensive member on trial? Does one pay (and draft for all requests)?
        )
        self.pays_alone: str | None = None  # the only one asked, if it pays and can be given thresholds to stop at
        self.is_settled = False  # is no member on trial?
        self.all_skipped = False  # is every expensive member skipped?
        self._step_s = 0.0
        self.expensive_s = 0.0  # host time spent on expensive members so far
        self.asks_expensive = False  # in the current step
        self.skips_cheap = False  # are the cheap members asked for no request now?
        self.not_due: Set[int] = frozenset()  # positions of requests for which the cheap members are not asked now
        self._cheap_tokens = 0.0  # that the cheap members bring, per request and step
        self._cheap_nodes = 0.0  # and for how many nodes
        self._deepest: dict[
            str, float
        ] = {}  # of those with levels: mean chance of a request's deepest node in this pass
        self._expected: dict[str, float] = {}  # expensive member -> tokens expected of its nodes in this pass
        self._order: list[str] = list(self.expensive)  # the expensive ones, the most profitable first
        self._only_cheap: dict[tuple[str, ...], bool] = {}  # a node's drafters -> none of them expensive
        self._owners: dict[tuple[str, ...], str] = {}  # a node's drafters -> the one that it counts for, in that order

    @property
    def needs(self) -> Needs:
        """Of all members but the skipped ones."""
        observing = tuple([name for name, member in self.expensive.items() if member.state != "skipped"])
        needs = self._needs.get(observing)
        if needs is None:
            needs = self._needs[observing] = union([self._cheap_needs, *[self._needs_of[name] for name in observing]])
        return needs

    def spend(self, member: str, seconds: float) -> None:
        super().spend(member, seconds)
        if member in self.expensive:
            self.expensive[member].spent_s += seconds
            self.expensive_s += seconds

    def charge(self, seconds: float) -> None:
        """Time spent for the expensive members alone, though not by them."""
        for member in self.expensive.values():
            if member.is_asked:
                member.spent_s += seconds

    def stop_at(self, bar: float) -> None:
        """`bar`: the chance from which on a node is worth its row. A path goes on only where what probably follows is
        worth another level of drafting too."""
        self.min_probs = min(MOST_LIKELY, bar), min(MOST_LIKELY, (bar + LEVEL_SHARE) / NEXT_CHANCE)

    def is_cheap(self, tree: DraftTree, node: int) -> bool:
        """Did none but cheap members draft it?"""
        assert tree.members is not None
        names = tree.members[node]
        cheap = self._only_cheap.get(names)
        if cheap is None:
            cheap = self._only_cheap[names] = self.expensive.keys().isdisjoint(names)
        return cheap

    def report(self, cheap: Reason = UNJUDGED) -> dict[str, Any]:
        """Member -> asked now or not, why, and its figures; for statistics and the server's page. `cheap`: what decides
        about the cheap ones, which are judged together, request by request."""
        figures: dict[str, Any] = {}
        for name, account in self.accounts.items():
            member = self.expensive.get(name)
            figures[name] = {
                "asked": account.is_used,
                "state": "cheap" if member is None else member.state,
                "num_asked": account.num_asked,
                "seconds": account.total_s,
            }
            if member is not None:
                figures[name]["profit_s_per_step"] = member.profit_s
            figures[name] |= (cheap if member is None else member.reason).figures(name)
        return figures

    def begin_step(
        self, num_requests: int, best_saving_s: float = math.inf, num_steps: int = 1, one_row_s: float = 0.0
    ) -> None:
        """Decide which members to ask, from now on.

        `best_saving_s`: what good drafts for so many requests would save, before the drafter's own time. `num_steps`:
        since the last call; while a member is on trial it is called in every step. `one_row_s`: a plain pass of one
        request, from which the cost of a level of drafting is estimated before it was measured."""
        self._step += num_steps
        asked = []
        has_trial = pays = False
        all_skipped = True
        for name, member in self.expensive.items():
            state = member.state
            at_best_s = best_saving_s - (member.cost_s or LEVEL_SHARE * one_row_s) * self._growth(num_requests)
            member.at_best = None
            if at_best_s <= 0.0:
                member.at_best = self._at_best(best_saving_s, at_best_s, num_requests)
                if state != "skipped":
                    member.tried_with = num_requests
                    self._skip_for(member, FIRST_PAUSE)
            elif state == "skipped":
                is_due = self._step >= member.next_trial or FEWER * num_requests <= member.tried_with
                if is_due and self._cheap_tokens < ENOUGH_CHEAP_TOKENS and at_best_s > WORTHWHILE * self._step_s:
                    member.begin("observes")
                    member.num_to_observe, member.lost_s = OBSERVE_STEPS, 0.0
            elif state == "observes":
                member.num_to_observe -= num_steps
                if member.num_to_observe <= 0:
                    member.begin("trial")
                    member.levels = None if member.levels is None else Levels(member.levels.most)
                    member.profit_s, member.spread, member.tried_with = 0.0, 0.0, num_requests
            has_trial = has_trial or member.state == "trial"
            pays = pays or member.state == "pays"
            all_skipped = all_skipped and member.state == "skipped"
            self.accounts[name].is_used = is_asked = member.is_asked
            if is_asked:
                asked.append(name)
        self.has_trial, self.pays, self.asks_expensive = has_trial, pays, bool(asked)
        self.pays_alone = asked[0] if pays and len(asked) == 1 and asked[0] in self._stoppable else None
        self.is_settled, self.all_skipped = not has_trial, all_skipped

    def _at_best(self, saving_s: float, profit_s: float, num_requests: int) -> Inequality:
        """What good drafts would bring beyond their rows' time, and the drafter's own time."""
        tokens_per_s = num_requests / self._step_s if self._step_s else 0.0
        return Inequality(max(0.0, saving_s) * tokens_per_s, saving_s - profit_s, tokens_per_s)

    @staticmethod
    def _growth(num_requests: int) -> float:
        """How many times as long as a trial, with a few requests, drafting for so many takes, at least."""
        return max(1.0, 1.0 + GROWING_SHARE * (num_requests / TRIAL_REQUESTS - 1.0))

    def budgets(self, member: str, budgets: list[Budget]) -> list[Budget]:
        """An expensive member on trial drafts for a few requests; a cheap one for those that are due."""
        expensive = self.expensive.get(member)
        if expensive is None and self.not_due:
            return [NO_BUDGET if i in self.not_due else budget for i, budget in enumerate(budgets)]
        if expensive is not None and expensive.levels is not None:
            most = expensive.levels.count
            budgets = [budget._replace(max_depth=min(budget.max_depth, most)) for budget in budgets]
        if expensive is None or expensive.state != "trial":
            return budgets
        return [budget if i < TRIAL_REQUESTS else NO_BUDGET for i, budget in enumerate(budgets)]

    def worth_asking(self) -> list[str]:
        asked = self.expensive if self.skips_cheap else self.accounts
        self._asked = [name for name in asked if self.accounts[name].is_used]
        for name in self._asked:
            self.accounts[name].num_asked += 1
        return self._asked

    def ask_none(self) -> None:
        self._asked = []

    def is_told(self, member: str) -> bool:
        """A cheap member is told of steps in which it was asked, an expensive one of all steps unless it is skipped."""
        expensive = self.expensive.get(member)
        return member in self._asked if expensive is None else expensive.state != "skipped"

    def record(self, hits: Sequence[Sequence[str]], num_tokens: int) -> None:
        """Merge judges what was drafted. Here nothing is done: `judge` counts what was offered."""

    def judge(
        self, passes: Sequence[RequestPass], token_s: float, row_s: float, step_s: float, ask_s: float = 0.0
    ) -> None:
        """`token_s`: what a token costs plainly; `row_s`: what one more row cost in the last pass; `ask_s`: what the
        cheap members took, per request."""
        num_rows, num_tokens, num_cheap = self._count(passes)
        self.note(
            num_cheap, sum([len(verified.draft) for verified in passes]) - sum(num_rows.values()), len(passes), step_s
        )
        # what a token costs without the expensive members
        worth_s = (token_s + row_s * self._cheap_nodes + ask_s) / (1.0 + self._cheap_tokens)
        for name, member in self.expensive.items():
            cost_s, member.spent_s = member.spent_s, 0.0
            if member.is_asked and name in self._asked:
                found = num_tokens[name]
                tokens = found + EXPECTED_SHARE * (self._expected.get(name, found) - found)
                brought = Brought(GAIN_SHARE * tokens, num_rows[name], row_s, cost_s, worth_s, self._deepest.get(name))
                self._settle(member, brought, token_s, max(1, len(passes)))

    def note(self, num_tokens: int, num_nodes: int, num_passes: int, step_s: float) -> None:
        """A step, the accepted tokens that the cheap members brought in it, and for how many nodes."""
        for member in self.expensive.values():
            if member.state == "observes":
                member.lost_s += member.spent_s
                member.spent_s = 0.0
        self._step_s += (step_s - self._step_s) / min(self._step + 1, MEMORY_STEPS)
        self._cheap_tokens += (num_tokens / max(1, num_passes) - self._cheap_tokens) / MEMORY_STEPS
        self._cheap_nodes += (num_nodes / max(1, num_passes) - self._cheap_nodes) / MEMORY_STEPS

    def skip_evaluation(self) -> None:
        """A step that is not evaluated."""
        for member in self.expensive.values():
            if member.state != "pays":
                member.lost_s += member.spent_s
            member.spent_s = 0.0

    def expect(
        self, trees: Sequence[DraftTree], keep: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> None:
        """Accepted tokens expected of the nodes offered next, by the member that they count for."""
        self._expected = dict.fromkeys(self.expensive, 0.0)
        self._deepest = {
            name: _mean_deepest(name, trees, chances)
            for name, member in self.expensive.items()
            if member.levels is not None
        }
        for tree, nodes, chance in zip(trees, keep, chances, strict=True):
            if tree.members is not None:
                for node in nodes:
                    names = tree.members[node]
                    owner = self._owners.get(names) or self._owner(names)
                    if owner in self._expected:
                        self._expected[owner] += chance[node]

    def _count(self, passes: Sequence[RequestPass]) -> tuple[dict[str, int], dict[str, int], int]:
        """Expensive member -> its nodes that were verified, and those of them whose tokens joined the output; and how
        many tokens joined it from the cheap ones."""
        num_rows, num_tokens, num_cheap = dict.fromkeys(self.expensive, 0), dict.fromkeys(self.expensive, 0), 0
        if len(self.expensive) > 1:
            order = sorted(self.expensive, key=lambda name: -self.expensive[name].profit_s)
            if order != self._order:
                self._order = order
                self._owners.clear()
        for verified in passes:
            members = verified.draft.members
            if members is None:
                continue
            owners = [self._owners.get(names) or self._owner(names) for names in members]
            for owner in owners:
                if owner in num_rows:
                    num_rows[owner] += 1
            for node in verified.accepted[: len(verified.new_token_ids)]:
                if owners[node] in num_tokens:
                    num_tokens[owners[node]] += 1
                else:
                    num_cheap += 1
        return num_rows, num_tokens, num_cheap

    def _owner(self, names: tuple[str, ...]) -> str:
        """The member that a node counts for, of those that drafted it: a cheap one, or else the most profitable."""
        owner = min(names, key=lambda name: self._order.index(name) if name in self.expensive else -1)
        self._owners[names] = owner
        return owner

    def skip(self) -> None:
        """A step that read prompts. It says nothing about drafts, but counts towards the length of a trial."""
        self.skip_evaluation()
        for member in self.expensive.values():
            if member.state == "trial":
                member.num_skipped += 1
                if member.num_skipped >= MOST_SKIPPED:
                    self._stop_asking(member)

    def _settle(self, member: ExpensiveMember, brought: Brought, token_s: float, num_requests: int) -> None:
        """A step's gain and cost. Those of a trial, with a few requests, are scaled to all requests."""
        on_trial = member.state == "trial"
        growth, num_asked, scale = self._growth(num_requests), num_requests, 1.0
        gain, cost_s, worth_s = brought.gain, brought.cost_s, brought.worth_s
        rows_s = brought.num_rows * brought.row_s
        if on_trial:
            member.lost_s += cost_s - (gain * worth_s - rows_s)
            if member.num_skipped < WARM_UP_STEPS:
                member.num_skipped += 1
                return
            member.least_s = min(member.least_s, cost_s)
            num_asked = min(num_requests, TRIAL_REQUESTS)
            scale, cost_s = num_requests / num_asked, cost_s * growth
        else:
            member.least_s = min(member.least_s, cost_s / growth)
        if member.levels is not None and brought.deepest is not None:
            member.levels.learn(brought.deepest, brought.cost_s, num_asked * brought.row_s, num_asked * worth_s)
        member.num_judged += 1
        member.learn(scale * gain, scale * rows_s + cost_s, worth_s)
        if member.num_judged < LEAST_STEPS:
            return
        # The gain varies from step to step: for each request that was asked for, tokens are accepted or not.
        standard_error_s = member.standard_error_s(token_s * num_requests / math.sqrt(num_asked))
        if on_trial:
            is_over, worthwhile_s = member.num_judged >= TRIAL_STEPS, WORTHWHILE * self._step_s
            least_s = worthwhile_s if is_over else worthwhile_s + GAIN_ERRORS * standard_error_s
            if member.profit_s > least_s and member.num_judged >= GAIN_STEPS:
                member.state = "pays"  # what was judged so far goes on counting
                member.pause, member.break_steps = FIRST_PAUSE, FIRST_BREAK
            elif is_over or member.profit_s < -LOSS_ERRORS * standard_error_s:
                self._stop_asking(member)
        else:
            least_s = STILL_WORTHWHILE * self._step_s
            for_long = member.num_judged >= LONG_ENOUGH and member.typical_s < least_s
            if member.profit_s < (least_s if for_long else -standard_error_s):
                self._stop_asking(member)

    def _stop_asking(self, member: ExpensiveMember) -> None:
        """It is skipped; or only observes for some steps, where it usually pays: the next text may suit it again."""
        if member.usually_gains(STILL_WORTHWHILE * self._step_s):
            member.begin("observes")
            member.num_to_observe, member.lost_s = member.break_steps, 0.0
            member.break_steps = min(LONGEST_BREAK, 2 * member.break_steps)
            return
        pause = FIRST_PAUSE
        if member.least_s < math.inf:  # infinite where all steps of a trial read prompts
            member.cost_s = member.least_s
        if member.state == "trial":
            pause, member.pause = member.pause, min(LONGEST_PAUSE, 2 * member.pause)
        self._skip_for(member, pause)

    def _skip_for(self, member: ExpensiveMember, pause: int) -> None:
        """For at least `pause` steps, and for so long that what it lost is a small share of their time."""
        longest = LONGEST_PAUSE
        if member.state != "pays" and self._step_s:
            pause = max(pause, int(member.lost_s / (TRIAL_SHARE * self._step_s)))
            longest = max(longest, int(member.lost_s / (MOST_TRIAL_SHARE * self._step_s)))
        member.begin("skipped")
        member.next_trial = self._step + min(longest, pause)


def _mean_deepest(name: str, trees: Sequence[DraftTree], chances: Sequence[Sequence[float]]) -> float:
    """Over the trees that it has a part in; the nodes of a path stand in order."""
    found = []
    for tree, chance in zip(trees, chances, strict=True):
        own = [node for node, names in enumerate(tree.members or ()) if name in names]
        if own:
            found.append(chance[own[-1]])
    return sum(found) / len(found) if found else 0.0
