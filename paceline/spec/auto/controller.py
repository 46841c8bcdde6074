"""`auto`: drafts where drafting pays, as measured live, and nowhere else.

Each step it
1. learns what the last pass cost (lab/live_pass_cost.py) and what each drafter's nodes brought (members.py),
2. asks the drafters that pay; the cheap ones only for the requests where that has been worth their time,
3. keeps the nodes that raise the whole batch's expected tokens per second (select.py); often that is none.

A request for which the cheap drafters do not pay is skipped: they are asked for it only as often as `ALLOWANCE` of the
time allows. As soon as a draft would pay, they are asked for it in every step again.

Pruning is exact: with sample-match verification the output does not depend on which nodes were offered.

    LLM(model, {"method": "auto"})                                the default
    LLM(model, {"method": "auto", "members": ["ngram", "suffix"], "node_budget": 16})   limits by hand
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.core.block_rows import BlockRows
from paceline.core.request import RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.cost import calibrate
from paceline.spec.auto.members import ALLOWANCE, MARGIN, RATE, MemberChoice
from paceline.spec.auto.reasons import Inequality, Reason
from paceline.spec.auto.select import Selection, above_bar, path_chances, select, whole
from paceline.spec.engine_parts import EngineParts
from paceline.spec.learned_entry import entry_of
from paceline.spec.merge.credit import Credit, Row, check_rows
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig

MAX_VALUE = 8.0  # cap on a request's value, in costs of asking: after a few useless drafts any request is skipped
EVALUATE_EVERY = 4  # steps; what was decided stands in between


class AutoProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        members: "Sequence[SpeculativeConfig] | None" = None,  # None: all that this target has
        credit: Sequence[Row] = (),  # what is known of them before anything runs
    ) -> None:
        # Both read the methods' table, which has a row for this file.
        from paceline.spec.auto.default_members import default_drafters
        from paceline.spec.merge.merge import MergeProposer

        if members is None:
            self.drafters = default_drafters(services, largest)
        else:
            self.drafters = MergeProposer(services, largest, members=members, credit=credit)
        self.choice = self.drafters.usefulness = MemberChoice(self.drafters.members)
        self._keeps_whole = any(member.keeps_whole for member in self.drafters.members.values())
        self.clock: Callable[[], float] = time.perf_counter
        self._entry = entry_of(self.drafters.configs, services)  # where it leaves what it learned for the next start
        kept = None if self._entry is None else self._entry.read()
        self._rounds: list[list[list[float]]] = [] if kept is None else kept["rounds"]  # of calibrations
        self.cost = PassCostModel(calibrate(services, self._rounds))
        # Request id -> time that the cheap members are expected to save in a step, averaged over the last drafts.
        self._values_s: dict[str, float] = {}
        self._typical_value_s = float("inf")  # of a new request: until drafts were judged, always worth asking
        self._draft_s = 0.0  # of the cheap members, per request asked, with what it took to learn from the answers
        self._ask_skipped_at = 0  # step: the cheap members are asked for all skipped requests
        self._num_cheap_asked = 0  # requests for which they were asked in the last step
        self._step_s = 0.0  # elapsed, on average
        self._handed_over_s: float | None = None  # when the last step's drafts were handed over
        self._planned_skips = self._num_skipped = 0  # steps in which it need not be called; and so far
        self._evaluates = True  # is the pass under way evaluated?
        self._evaluated_step = -1  # the last one that was
        self._totals = {"steps": 0, "asked": 0, "drafted_nodes": 0, "offered_nodes": 0}
        self._own_s = 0.0  # in all steps, without the drafters
        self._host_s = 0.0  # of the last pass' observation, with them
        self._last: Selection | None = None
        self._cheap_judged = Inequality()  # per request and step in which the cheap members are asked for it
        self._plain_step = 0  # the last evaluated one without drafts
        self._num_requests = 0  # in the batch, when it was last evaluated
        self._reasons: Counter[str] = Counter()  # reason -> steps
        self.is_warm = kept is not None  # does it go on from what an earlier start learned?
        if kept is not None:
            self._go_on_from(kept)

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # read only: it follows which members are skipped
        return self.choice.needs

    def check_params(self, params: SamplingParams) -> None:
        self.drafters.check_params(params)

    def block_rows(self) -> Sequence[BlockRows]:
        return self.drafters.block_rows()

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.drafters.use_clock(clock)

    def skips_next_step(self) -> bool:
        return self._num_skipped < self._planned_skips

    def skip_step(self) -> None:
        self._num_skipped += 1

    def member_figures(self) -> dict[str, dict[str, Any]]:
        return self.drafters.member_figures()

    def observe(self, step: StepContext) -> None:
        begin_s = self.clock()
        self._learn(step, begin_s)
        for request in step.gone:
            self._values_s.pop(request.request_id, None)
        self._own_s += self.clock() - begin_s
        self.drafters.observe(step)
        if self._entry is not None:
            self._entry.note(self.learned, is_idle=step.load == 0)
        self._host_s = self.clock() - begin_s

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        begin_s = self.clock()
        choice, requests = self.choice, step.requests
        self._totals["steps"] += self._num_skipped
        self._reasons["skipped"] += self._num_skipped
        now = self._totals["steps"]
        is_due = now - self._evaluated_step >= EVALUATE_EVERY
        self._evaluates = is_due or choice.has_trial or len(requests) > self._num_requests
        if self._evaluates:
            num_running = sum([verified.request.status is RequestStatus.RUNNING for verified in step.passes])
            self._num_requests = max(num_running, len(requests))
            choice.begin_step((now - self._evaluated_step) * self._step_s)
            self._evaluated_step = now
        for request in requests:
            self._values_s.setdefault(request.request_id, self._typical_value_s)
        takes_skipped = now >= self._ask_skipped_at
        # What drafts are compared with is known from plain passes: a share of the steps is one, whatever pays.
        is_plain = self._evaluates and now - self._plain_step > 1 / ALLOWANCE
        due = []
        if choice.has_cheap and not is_plain:
            due = [i for i, one in enumerate(requests) if takes_skipped or not self._is_skipped(one.request_id)]
        asked = list(range(len(requests))) if choice.asks_batch and not is_plain else due
        choice.skips_cheap, choice.not_due = not due, set(asked).difference(due)
        self._num_cheap_asked, drafting_s = len(due), 0.0
        trees = [EMPTY_TREE] * len(requests)
        if asked:
            drafted, drafting_s = self._ask(step, budgets, asked)
            for i, tree in zip(asked, drafted, strict=True):
                trees[i] = tree
        else:
            choice.ask_none()
            self._reasons["skipped"] += 1
        num_skipped = sum([self._is_skipped(request.request_id) for request in requests])
        if takes_skipped and due:  # so late again that it takes the share of the time that it may take
            skipped_s = self._draft_s * num_skipped
            self._ask_skipped_at = now + max(EVALUATE_EVERY, int(skipped_s / (ALLOWANCE * self._step_s or 1.0)))
        can_skip = choice.all_skipped and (not choice.has_cheap or num_skipped == len(requests))
        until = self._ask_skipped_at if choice.has_cheap else now + EVALUATE_EVERY
        self._planned_skips, self._num_skipped = max(0, until - now - 1) if can_skip else 0, 0
        self._handed_over_s = self.clock()
        self._own_s += self._handed_over_s - begin_s - drafting_s
        self._charge(self._handed_over_s - begin_s)
        self._totals["steps"] += 1
        return trees

    def report(self) -> dict[str, Any]:
        """What it knows and what it decided last, for statistics and the server's page."""
        requests = list(self._values_s)  # a snapshot: the engine's thread may be changing it
        num_skipped = sum(self._is_skipped(request_id) for request_id in requests)
        return {
            **self._totals,
            "start": "warm" if self.is_warm else "cold",
            "own_s": self._own_s,
            "pass_cost_s": self.cost.table(),
            "members": self.choice.report(self._cheap_reason(len(requests), num_skipped)),
            "reasons": dict(self._reasons),
            "last_decision": self._reason(),
        }

    def learned(self) -> dict[str, Any]:
        """What the next start goes on from, as JSON. Change its form, and learned_cache's `FORMAT` has to change."""
        return {
            "rounds": self._rounds,
            "curve": self.cost.learned(),
            "credit": self.drafters.credit.rows(),
            "members": self.choice.learned(),
        }

    def _go_on_from(self, kept: dict[str, Any]) -> None:
        self.cost.begin_with(**kept["curve"])
        self.drafters.credit = Credit(check_rows("credit", kept["credit"]))
        self.choice.begin_with(kept["members"])

    # -- learning ----------------------------------------------------------------------------------------------------

    def _learn(self, step: StepContext, now_s: float) -> None:
        """What the pass took and what became of its drafts."""
        if self._handed_over_s is None:
            return
        elapsed_s, self._handed_over_s = now_s - self._handed_over_s, None
        verified = [one for one in step.passes if one.logits_row >= 0]
        if not verified or elapsed_s <= 0.0 or any(one.num_committed > 1 for one in step.passes):
            self.choice.skip_evaluation()  # prompt rows have a cost of their own
            return
        if not self._evaluates:
            return
        own = [one for one in verified if one.request.request_id in self._values_s]  # others chose for themselves
        num_rows, count = sum([len(one.rows) for one in step.passes]), len(verified)
        self._step_s += (RATE if self._step_s else 1.0) * (elapsed_s - self._step_s)
        self.cost.observe(num_rows, elapsed_s, count)
        if num_rows == count:
            self._plain_step = self._evaluated_step
        plain_s, num_more = self.cost.at(count, count), max(count, num_rows - count)
        row_s = (self.cost.at(count + num_more, count) - plain_s) / num_more
        self.choice.judge(own, plain_s / count, row_s, self._num_cheap_asked)

    def _charge(self, propose_s: float) -> None:
        """What drafting took in this step, with the time beside the drafters': to learn, to join, to decide."""
        choice = self.choice
        cheap_s, beside_s = choice.cheap_s, self._host_s + propose_s - choice.cheap_s - choice.batch_s
        self._host_s = choice.cheap_s = choice.batch_s = 0.0
        if self._num_cheap_asked:
            sample_s = (cheap_s + (0.0 if choice.asks_batch else beside_s)) / self._num_cheap_asked
            # What past outputs take to be indexed, all at once, is not what one draft takes.
            before_s = self._draft_s or sample_s
            self._draft_s = before_s + RATE * (min(sample_s, 2.0 * before_s) - before_s)
        elif choice.asks_batch:
            is_seldom = choice.pays_alone is not None  # in other steps its trees are offered as they are
            choice.charge(beside_s / EVALUATE_EVERY if is_seldom else beside_s)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _is_skipped(self, request_id: str) -> bool:
        """Are the cheap members asked for this request only now and then?"""
        return self._values_s.get(request_id, self._typical_value_s) <= MARGIN * self._draft_s

    def _ask(self, step: StepContext, budgets: Sequence[Budget], asked: Sequence[int]) -> tuple[list[DraftTree], float]:
        """The trees to offer, and what it took to draft them. In a step that is not evaluated, a member that pays and
        drafts alone was given the thresholds at which to stop: what it drafts is offered as it is."""
        begin_s = self.clock()
        alone = None if self._num_cheap_asked or self._evaluates else self.choice.pays_alone
        least = self.choice.min_probs
        if alone is not None:
            given = [Budget(budget.num_nodes, budget.max_depth, *least) for budget in budgets]
            offered = drafted = self.drafters.propose_alone(alone, step, given)
            drafting_s = self.clock() - begin_s
            self._reasons["pays" if any(tree.token_ids for tree in drafted) else "nothing_drafted"] += 1
        else:
            part = replace(step, requests=[step.requests[i] for i in asked])
            given = [Budget(budgets[i].num_nodes, budgets[i].max_depth, *least) for i in asked]
            self.drafters.learns = self._evaluates
            drafted = self.drafters.propose(part, given)
            drafting_s = self.clock() - begin_s
            offered = self._choose([step.requests[i].request_id for i in asked], drafted, drafting_s)
        self._totals["asked"] += len(asked)
        self._totals["drafted_nodes"] += sum([len(tree.token_ids) for tree in drafted])
        self._totals["offered_nodes"] += sum([len(tree.token_ids) for tree in offered])
        return offered, drafting_s

    def _choose(self, request_ids: Sequence[str], drafted: Sequence[DraftTree], drafting_s: float) -> list[DraftTree]:
        choice, selection = self.choice, self._last
        chances = [path_chances(tree) for tree in drafted]
        if self._evaluates or selection is None:
            selection = select(chances, self._num_requests, self.cost, MARGIN, drafting_s)
            kept = selection.keep
        else:
            kept = above_bar(chances, selection.bar)
        reason = "pays" if any(kept) else "too_expensive" if any(chances) else "nothing_drafted"
        if self._keeps_whole:  # then whether to ask at all is the choice
            selection = whole(selection, chances, self._num_requests, self.cost)
            kept, reason = selection.keep, "probe" if reason == "too_expensive" else reason
        self._last = selection
        self._reasons[reason] += 1
        if self._evaluates:
            choice.expect(drafted, chances)
            choice.stop_at(selection.bar, selection.plain_s)
        if self._num_cheap_asked:
            self._judge_cheap(request_ids, drafted, kept, chances, selection)
        # A tree sampled from a distribution of its own must not be pruned by what was drawn.
        return [
            tree if len(keep) == len(tree.token_ids) or tree.draft_probs is not None else tree.keep(keep)
            for tree, keep in zip(drafted, kept, strict=True)
        ]

    def _judge_cheap(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[DraftTree],
        kept: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
        selection: Selection,
    ) -> None:
        """Was it worth asking the cheap members? Where it was not, the request is skipped."""
        choice = self.choice
        # Without their drafts a token would cost what it costs with the other members' alone, or plainly.
        token_s = selection.token_s if choice.asks_batch else selection.plain_s / self._num_requests
        most_s, row_s = MAX_VALUE * self._draft_s, (selection.pass_s - selection.plain_s) / max(1, selection.num_nodes)
        for position, (request_id, tree, keep) in enumerate(zip(request_ids, drafted, kept, strict=True)):
            if position in choice.not_due:
                continue
            nodes = choice.only_cheap(tree, keep) if choice.asks_batch else keep
            gain, rows_s = sum([chances[position][node] for node in nodes]), len(nodes) * row_s
            self._cheap_judged.learn(RATE, gain, rows_s + self._draft_s, token_s)
            value_s = min(most_s, gain * token_s - rows_s)
            typical_s, before_s = min(most_s, self._typical_value_s), min(most_s, self._values_s[request_id])
            self._typical_value_s = typical_s + RATE * (value_s - typical_s)
            self._values_s[request_id] = max(value_s, before_s + RATE * (value_s - before_s))

    # -- saying why --------------------------------------------------------------------------------------------------

    def _cheap_reason(self, num_requests: int, num_skipped: int) -> Reason:
        """What decides about the cheap members."""
        is_used = self._typical_value_s > MARGIN * self._draft_s  # as for a new request
        decision = "on" if is_used else "off"
        if num_requests:
            is_used = num_skipped < num_requests
            decision = f"on for {num_requests - num_skipped} of {num_requests} requests" if is_used else "off"
        return self._cheap_judged.reason(decision, is_used)

    def _reason(self) -> str:
        last = self._last
        if last is None:
            return "nothing asked yet"
        batch = f"{self._num_requests} request{'s' if self._num_requests != 1 else ''}"
        if last.num_nodes == 0:
            return f"off: no draft for {batch} is expected to save more than it costs"
        more, speedup = last.pass_s / last.plain_s, 1.0 + last.gain / max(1, self._num_requests)
        return (
            f"{last.num_nodes} nodes for {batch}: {last.gain:.2f} more tokens for {more - 1.0:.0%} more time, "
            f"{speedup / more:.2f}x"
        )


def alone(config: "SpeculativeConfig", services: EngineParts, largest: Budget) -> AutoProposer:
    """A method by itself, at the sizes that pay: the only member, or `merge`'s own members."""
    if config.method == "merge":
        return AutoProposer(services, largest, members=config.options["members"], credit=config.options["credit"])
    return AutoProposer(services, largest, members=[config])
