"""Which members `auto` asks: the cheap ones always, a dear one only as long as it pays for itself.

A member that reads logits or hidden states takes time for every row or level, so it has to earn it. Its profit in a
step is what the tokens that it brought would have cost plainly, less the rows of its own nodes, less its own time, all
of it as it really came out. Where the cheap members bring tokens of their own a token costs less to begin with, and a
node that a cheap member or a more profitable one drafted too counts for them: of two dear members that draft the same,
one is kept, not none.

    asleep  -> listens    when its next trial is due, or at once when the batch has become much smaller; not while the
                          cheap members do so well that there is little left to gain, nor where even good drafts
                          would bring less than a trial must
    listens -> trial      after some steps: it has seen enough to draft from
    trial   -> pays, or asleep, as soon as its profit is clearly above or below zero
    pays    -> asleep     when its profit is clearly below zero
             -> listens   instead of asleep where it usually pays: it rests, for a little longer each time

A sleeper costs nothing: it hears of nothing, and what it alone needs is not computed. After each trial that loses, the
next one comes later and later, so that all trials together stay a small share of the time.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from paceline.core.tree import DraftTree
from paceline.spec.merge.usefulness import Usefulness
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, union

TRIAL_STEPS, TRIAL_REQUESTS = 64, 2  # at most
DOUBTS = 2.5  # standard errors by which the profit of a trial must be below zero to end it early
# What a trial must bring: so much of a step's time, by so many standard errors or to its end, after so many steps.
# What gains less is as easily a loss, and dear to tell from one.
WORTHWHILE, FIRM_DOUBTS, FIRM_STEPS = 0.03, 1.5, 12
STILL_WORTHWHILE = 0.01  # of a step's time: what one must bring that has been taken on
GAIN_SHARE = 0.96  # of what a member's tokens save; the rest is for what it costs unseen, such as keeping hidden states
PRIOR_SPREAD = 0.5  # tokens: steps that brought nothing say little, because one that brings a lot may follow
LONG_ENOUGH = 24  # steps after which too small a profit counts as a loss, where it has been that for long
ENOUGH = 1.0  # accepted tokens per request and step from the cheap members: there is little left to gain
LEAST_STEPS = 4  # judged before any verdict
NO_BUDGET = Budget(0, 0)
ASKED = ("trial", "pays")  # states
LISTEN_STEPS = 12  # before a trial, where it has missed something
WARM_UP_STEPS = 2  # of a trial, not judged
PAYS_STEPS = 24.0  # looked at, over which a member that pays is judged
MEMORY_STEPS = 16.0  # and over which the steps themselves are averaged
EXPECTED_SHARE = 0.75  # of the judgement is what was expected: what comes is mostly luck
FIRST_PAUSE, LONGEST_PAUSE = 96, 2048  # steps between two trials
TYPICAL_STEPS = 128.0  # one that has paid over so many steps
FIRST_REST, LONGEST_REST = 16, 128  # steps: only rests, and listens meanwhile
KNOWN_STEPS = 32  # after which a member is known at all
MOST_SKIPPED = 32  # steps of a trial that read prompts too: then it ends, without a verdict
GROWING_SHARE = 0.35  # of the time that a trial takes, at least, grows with the requests
FEWER = 4  # times fewer requests than in the last trial: reason enough for another one
# A level of drafting takes about so much of what a token takes; the next token is foreseen so often, typically; and a
# path that is as likely as this is never left.
LEVEL_SHARE, NEXT_CHANCE, MOST_LIKELY = 0.08, 0.7, 0.7
TRIAL_SHARE = 0.005  # of the elapsed time, that trials which lose may take


@dataclass(slots=True)
class DearMember:
    """What is known of a member that costs time."""

    state: str = "listens"  # "asleep", "listens", "trial" or "pays"
    profit_s: float = 0.0  # per step in which it was asked, lately
    spread: float = 0.0  # its variance
    typical_s: float = 0.0  # the profit over a long time
    spent_s: float = 0.0  # since the last step was judged
    least_s: float = math.inf  # host time of a step in which a few requests were asked, the least so far
    cost_s: float = 0.0  # the same, once a trial has been lost: what it costs at any rate
    lost_s: float = 0.0  # by this trial and by listening before it, as it really came out
    num_judged: int = 0  # steps of this trial, or since it was over
    num_skipped: int = 0  # steps of this trial that were not: the first ones, and those that read prompts
    num_to_hear: int = 0  # steps that it still listens to
    next_trial: int = 0  # step
    pause: int = FIRST_PAUSE
    rest: int = FIRST_REST
    num_known: int = 0  # steps that the long-time profit comes from
    tried_with: int = 0  # requests in the batch of the last trial

    @property
    def is_asked(self) -> bool:
        return self.state in ASKED

    def begin(self, state: str) -> None:
        self.state, self.num_judged, self.num_skipped = state, 0, 0

    def learn(self, profit_s: float) -> None:
        weight = 1.0 / self._num_remembered
        off_s = profit_s - self.profit_s
        self.profit_s += weight * off_s
        self.spread = (1.0 - weight) * (self.spread + weight * off_s * off_s)
        self.num_known += 1
        self.typical_s += (profit_s - self.typical_s) / min(self.num_known, TYPICAL_STEPS)

    def usually_brings(self, least_s: float) -> bool:
        return self.num_known >= KNOWN_STEPS and self.typical_s > least_s

    def doubt_s(self, spread_s: float) -> float:
        """How far the profit may be off, for the few steps that it comes from."""
        spread = max(self.spread, (PRIOR_SPREAD * spread_s) ** 2)
        return math.sqrt(spread / self._num_remembered)

    @property
    def _num_remembered(self) -> float:
        return max(1.0, min(self.num_judged, TRIAL_STEPS if self.state == "trial" else PAYS_STEPS))


class MemberChoice(Usefulness):
    """Takes the place of merge's own judgement, because the controller knows what rows and tokens cost."""

    def __init__(self, members: Mapping[str, Proposer]) -> None:
        super().__init__(list(members))
        self.dear = {
            name: DearMember() for name, member in members.items() if member.needs.logits or member.needs.hidden_layers
        }
        self._cheap_needs = union([member.needs for name, member in members.items() if name not in self.dear])
        self._needs_of = {name: members[name].needs for name in self.dear}
        # Those that can be told to stop where a path is no longer likely; not those that draw, for it would be a bias.
        self._stoppable = {name for name in self.dear if members[name].keeps_min_prob}
        self.min_probs = (0.0, 0.0)  # Budget's: of a path worth its row, and of one worth another level
        self._needs: dict[tuple[str, ...], Needs] = {}  # who is not asleep -> what everybody needs
        self._step = 0
        self.has_trial = self.pays = False  # is a dear member on trial; does one pay, and is asked for every request
        self.pays_alone: str | None = None  # who pays, where no other is asked and it stops by itself where rows do not
        self.is_settled = False  # is nobody on trial?
        self.all_sleep = False  # is every dear member asleep?
        self._step_s = 0.0
        self.dear_s = 0.0  # host time spent on dear members so far
        self.asks_dear = False  # in the current step
        self.cheap_sleep = False  # are the cheap members asked for nobody now?
        self.sleepers: Set[int] = frozenset()  # positions of requests for which the cheap members are not asked now
        self._cheap_tokens = 0.0  # that the cheap members bring, per request and step
        self._cheap_nodes = 0.0  # and for how many nodes
        self._expected: dict[str, float] = {}  # dear member -> tokens that its nodes in this pass should bring
        self._order: list[str] = list(self.dear)  # the dear ones, the most profitable first
        self._only_cheap: dict[tuple[str, ...], bool] = {}  # a node's drafters -> none of them dear
        self._owners: dict[tuple[str, ...], str] = {}  # a node's drafters -> whom it counts for, in that order

    @property
    def needs(self) -> Needs:
        """Of everybody but the sleepers."""
        awake = tuple([name for name, member in self.dear.items() if member.state != "asleep"])
        needs = self._needs.get(awake)
        if needs is None:
            needs = self._needs[awake] = union([self._cheap_needs, *[self._needs_of[name] for name in awake]])
        return needs

    def spend(self, member: str, seconds: float) -> None:
        super().spend(member, seconds)
        if member in self.dear:
            self.dear[member].spent_s += seconds
            self.dear_s += seconds

    def charge(self, seconds: float) -> None:
        """What was spent for the dear members alone, though not by them."""
        for member in self.dear.values():
            if member.is_asked:
                member.spent_s += seconds

    def stop_at(self, bar: float) -> None:
        """`bar`: the chance from which on a node is worth its row. To go on behind it, what probably follows must be
        worth another level too."""
        self.min_probs = min(MOST_LIKELY, bar), min(MOST_LIKELY, (bar + LEVEL_SHARE) / NEXT_CHANCE)

    def is_cheap(self, tree: DraftTree, node: int) -> bool:
        """Did none but cheap members draft it?"""
        assert tree.members is not None
        names = tree.members[node]
        cheap = self._only_cheap.get(names)
        if cheap is None:
            cheap = self._only_cheap[names] = self.dear.keys().isdisjoint(names)
        return cheap

    def num_only_cheap(self, passes: Sequence[RequestPass]) -> int:
        """Tokens that joined the output and that none but cheap members had drafted."""
        return sum([self.is_cheap(one.draft, node) for one in passes for node in one.accepted])

    def report(self) -> dict[str, Any]:
        """Member -> asked now or not, why, and its figures; for statistics and the server's page."""
        figures: dict[str, Any] = {}
        for name, account in self.accounts.items():
            member = self.dear.get(name)
            figures[name] = {
                "asked": account.awake,
                "state": "cheap" if member is None else member.state,
                "num_asked": account.num_asked,
                "seconds": account.total_s,
            }
            if member is not None:
                figures[name]["profit_s_per_step"] = member.profit_s
        return figures

    def begin_step(
        self, num_requests: int, hope_s: float = math.inf, num_steps: int = 1, one_row_s: float = 0.0
    ) -> None:
        """Decide whom to ask, from now on.

        `hope_s`: what good drafts for so many requests would save, before the drafter's own time. `num_steps`: since
        the last call; while somebody is on trial it is called in every step. `one_row_s`: a plain pass of one request,
        for what a level of drafting takes at least, where nobody has seen it yet."""
        self._step += num_steps
        asked = []
        has_trial = pays = False
        all_sleep = True
        for name, member in self.dear.items():
            state = member.state
            at_best_s = hope_s - (member.cost_s or LEVEL_SHARE * one_row_s) * self._growth(num_requests)
            if at_best_s <= 0.0:
                if state != "asleep":
                    member.tried_with = num_requests
                    self._put_to_sleep(member, FIRST_PAUSE)
            elif state == "asleep":
                is_due = self._step >= member.next_trial or FEWER * num_requests <= member.tried_with
                if is_due and self._cheap_tokens < ENOUGH and at_best_s > WORTHWHILE * self._step_s:
                    member.begin("listens")
                    member.num_to_hear, member.lost_s = LISTEN_STEPS, 0.0
            elif state == "listens":
                member.num_to_hear -= num_steps
                if member.num_to_hear <= 0:
                    member.begin("trial")
                    member.profit_s, member.spread, member.tried_with = 0.0, 0.0, num_requests
            has_trial = has_trial or member.state == "trial"
            pays = pays or member.state == "pays"
            all_sleep = all_sleep and member.state == "asleep"
            self.accounts[name].awake = is_asked = member.is_asked
            if is_asked:
                asked.append(name)
        self.has_trial, self.pays, self.asks_dear = has_trial, pays, bool(asked)
        self.pays_alone = asked[0] if pays and len(asked) == 1 and asked[0] in self._stoppable else None
        self.is_settled, self.all_sleep = not has_trial, all_sleep

    @staticmethod
    def _growth(num_requests: int) -> float:
        """How many times more than a trial, with a few requests, it takes to draft for so many, at least."""
        return max(1.0, 1.0 + GROWING_SHARE * (num_requests / TRIAL_REQUESTS - 1.0))

    def budgets(self, member: str, budgets: list[Budget]) -> list[Budget]:
        """A trial is made with a few requests: the others pay nothing for it. The cheap leave sleepers alone."""
        dear = self.dear.get(member)
        if dear is None and self.sleepers:
            return [NO_BUDGET if i in self.sleepers else budget for i, budget in enumerate(budgets)]
        if dear is None or dear.state != "trial":
            return budgets
        return [budget if i < TRIAL_REQUESTS else NO_BUDGET for i, budget in enumerate(budgets)]

    def worth_asking(self) -> list[str]:
        asked = self.dear if self.cheap_sleep else self.accounts
        self._asked = [name for name in asked if self.accounts[name].awake]
        for name in self._asked:
            self.accounts[name].num_asked += 1
        return self._asked

    def ask_nobody(self) -> None:
        self._asked = []

    def is_told(self, member: str) -> bool:
        """A cheap member is told what it was asked about, a dear one everything unless it sleeps."""
        dear = self.dear.get(member)
        return member in self._asked if dear is None else dear.state != "asleep"

    def record(self, hits: Sequence[Sequence[str]], num_tokens: int) -> None:
        """Merge's verdict on what was drafted; judged here instead is what was offered."""

    def judge(
        self, passes: Sequence[RequestPass], token_s: float, row_s: float, step_s: float, ask_s: float = 0.0
    ) -> None:
        """`token_s`: what a token costs plainly; `row_s`: what one more row cost in the last pass; `ask_s`: what the
        cheap members took, per request."""
        num_rows, num_tokens, num_cheap = self._count(passes)
        self.note(
            num_cheap, sum([len(verified.draft) for verified in passes]) - sum(num_rows.values()), len(passes), step_s
        )
        # what a token costs without the dear members
        worth_s = (token_s + row_s * self._cheap_nodes + ask_s) / (1.0 + self._cheap_tokens)
        for name, member in self.dear.items():
            cost_s, member.spent_s = member.spent_s, 0.0
            if member.is_asked and name in self._asked:
                found = num_tokens[name]
                tokens = found + EXPECTED_SHARE * (self._expected.get(name, found) - found)
                gain_s = GAIN_SHARE * worth_s * tokens - row_s * num_rows[name]
                self._settle(member, gain_s, cost_s, token_s, max(1, len(passes)))

    def note(self, num_tokens: int, num_nodes: int, num_passes: int, step_s: float) -> None:
        """A step, the accepted tokens that the cheap members brought in it, and for how many nodes."""
        for member in self.dear.values():
            if member.state == "listens":
                member.lost_s += member.spent_s
                member.spent_s = 0.0
        self._step_s += (step_s - self._step_s) / min(self._step + 1, MEMORY_STEPS)
        self._cheap_tokens += (num_tokens / max(1, num_passes) - self._cheap_tokens) / MEMORY_STEPS
        self._cheap_nodes += (num_nodes / max(1, num_passes) - self._cheap_nodes) / MEMORY_STEPS

    def pass_over(self) -> None:
        """A step that nobody looks at."""
        for member in self.dear.values():
            if member.state != "pays":
                member.lost_s += member.spent_s
            member.spent_s = 0.0

    def expect(
        self, trees: Sequence[DraftTree], keep: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]
    ) -> None:
        """What the nodes offered next should bring their owners."""
        self._expected = dict.fromkeys(self.dear, 0.0)
        for tree, nodes, chance in zip(trees, keep, chances, strict=True):
            if tree.members is not None:
                for node in nodes:
                    names = tree.members[node]
                    owner = self._owners.get(names) or self._owner(names)
                    if owner in self._expected:
                        self._expected[owner] += chance[node]

    def _count(self, passes: Sequence[RequestPass]) -> tuple[dict[str, int], dict[str, int], int]:
        """Dear member -> its nodes that were verified, and those of them whose tokens joined the output; and how many
        tokens joined it from the cheap ones."""
        num_rows, num_tokens, num_cheap = dict.fromkeys(self.dear, 0), dict.fromkeys(self.dear, 0), 0
        if len(self.dear) > 1:
            order = sorted(self.dear, key=lambda name: -self.dear[name].profit_s)
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
        """Whom a node counts for, of those who drafted it: a cheap member, or else the most profitable one."""
        owner = min(names, key=lambda name: self._order.index(name) if name in self.dear else -1)
        self._owners[names] = owner
        return owner

    def skip(self) -> None:
        """A step that says nothing of drafts, because it read prompts: neither cost nor gain, but time of a trial."""
        self.pass_over()
        for member in self.dear.values():
            if member.state == "trial":
                member.num_skipped += 1
                if member.num_skipped >= MOST_SKIPPED:
                    self._rest_or_sleep(member)

    def _settle(self, member: DearMember, gain_s: float, cost_s: float, token_s: float, num_requests: int) -> None:
        """A step's gain and cost. Those of a trial, with a few requests, count as they would be if all were asked."""
        on_trial = member.state == "trial"
        growth, num_asked = self._growth(num_requests), num_requests
        if on_trial:
            member.lost_s += cost_s - gain_s
            if member.num_skipped < WARM_UP_STEPS:
                member.num_skipped += 1
                return
            member.least_s = min(member.least_s, cost_s)
            num_asked = min(num_requests, TRIAL_REQUESTS)
            gain_s, cost_s = gain_s * num_requests / num_asked, cost_s * growth
        else:
            member.least_s = min(member.least_s, cost_s / growth)
        member.num_judged += 1
        member.learn(gain_s - cost_s)
        if member.num_judged < LEAST_STEPS:
            return
        # By how much the gain differs from step to step: tokens come or do not, for each request that was asked.
        doubt_s = member.doubt_s(token_s * num_requests / math.sqrt(num_asked))
        if on_trial:
            is_over, worthwhile_s = member.num_judged >= TRIAL_STEPS, WORTHWHILE * self._step_s
            least_s = worthwhile_s if is_over else worthwhile_s + FIRM_DOUBTS * doubt_s
            if member.profit_s > least_s and member.num_judged >= FIRM_STEPS:
                member.state = "pays"  # and the judgement goes on
                member.pause, member.rest = FIRST_PAUSE, FIRST_REST
            elif is_over or member.profit_s < -DOUBTS * doubt_s:
                self._rest_or_sleep(member)
        else:
            least_s = STILL_WORTHWHILE * self._step_s
            for_long = member.num_judged >= LONG_ENOUGH and member.typical_s < least_s
            if member.profit_s < (least_s if for_long else -doubt_s):
                self._rest_or_sleep(member)

    def _rest_or_sleep(self, member: DearMember) -> None:
        """Or only to rest, where it usually brings something: what comes next, another request perhaps, may suit it."""
        if member.usually_brings(STILL_WORTHWHILE * self._step_s):
            member.begin("listens")
            member.num_to_hear, member.lost_s = member.rest, 0.0
            member.rest = min(LONGEST_REST, 2 * member.rest)
            return
        pause = FIRST_PAUSE
        if member.least_s < math.inf:  # it is not where all steps of a trial read prompts
            member.cost_s = member.least_s
        if member.state == "trial":
            pause, member.pause = member.pause, min(LONGEST_PAUSE, 2 * member.pause)
        self._put_to_sleep(member, pause)

    def _put_to_sleep(self, member: DearMember, pause: int) -> None:
        """For so many steps at least, and for so long that what it lost is a small share of them."""
        if member.state != "pays" and self._step_s:
            pause = max(pause, int(member.lost_s / (TRIAL_SHARE * self._step_s)))
        member.begin("asleep")
        member.next_trial = self._step + min(LONGEST_PAUSE, pause)
