"""`auto`: drafts where drafting pays, as measured live, and nowhere else.

Each step it
1. learns what the last pass cost (lab/live_pass_cost.py) and whether each request's drafts were right,
2. asks the drafters, for the requests where asking has been worth the drafters' own time,
3. keeps the nodes that raise the whole batch's expected tokens per second (select.py); often that is none.

A request whose drafts do not pay is skipped: drafters are asked for it only when its text begins to repeat itself, and
every 1, 2, 4, ... steps. Asking for skipped requests may take a small share of the elapsed time (`ALLOWANCE`). As soon
as a draft would pay, drafters are asked for it in every step again.

Pruning is exact: with sample-match verification the output does not depend on which nodes were offered.

    LLM(model, {"method": "auto"})                                the default
    LLM(model, {"method": "auto", "members": ["ngram", "suffix"], "node_budget": 16})   limits by hand
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.core.block_rows import BlockRows
from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.cost import calibrate
from paceline.spec.auto.members import ALLOWANCE, MARGIN, RATE, MemberChoice
from paceline.spec.auto.reasons import Inequality, Reason
from paceline.spec.auto.select import Selection, above_bar, path_chances, select, whole
from paceline.spec.engine_parts import EngineParts
from paceline.spec.merge.credit import Row
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig

MAX_VALUE = 8.0  # cap on a request's value, in costs of asking: after a few useless drafts any request is skipped
LEAST_ROOM = 8  # nodes asked for
EVALUATE_EVERY = 4  # steps; what was decided stands in between
NO_REQUESTS: frozenset[int] = frozenset()


@dataclass(slots=True)
class RequestRecord:
    """What the controller knows of one request."""

    value_s: float  # time that a draft is expected to save, averaged over the last ones asked for
    is_skipped: bool = False  # the cheap drafters are asked for it only now and then
    room: int = LEAST_ROOM  # nodes to ask for: follows what was kept, because drafting takes time too

    def follow(self, num_kept: int) -> None:
        if 4 * num_kept >= 3 * self.room:
            self.room *= 2
        elif 4 * num_kept < self.room:
            self.room = max(LEAST_ROOM, self.room // 2)


class AutoProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        members: "Sequence[SpeculativeConfig] | None" = None,  # None: all that this target has
        credit: Sequence[Row] = (),  # what is known of them before anything runs
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from paceline.spec.auto.default_members import (
            default_drafters,  # reads the methods' table, which has a row for this file
        )
        from paceline.spec.merge.merge import MergeProposer

        if members is None:
            self.drafters = default_drafters(services, largest)
        else:
            self.drafters = MergeProposer(services, largest, members=members, credit=credit)
        self.choice = self.drafters.usefulness = MemberChoice(self.drafters.members)
        self._keeps_whole = any(member.keeps_whole for member in self.drafters.members.values())
        self.clock = clock
        self.cost = PassCostModel(calibrate(services))
        self._records: dict[str, RequestRecord] = {}
        self._typical_value_s = float("inf")  # of a new request: until drafts were judged, always worth asking
        self._draft_s = 0.0  # per request asked, with what it took to learn from the answers
        self._learn_s = 0.0  # of the last step
        self._ask_skipped_at = 0  # step: cheap members are asked for skipped requests too, all in the same step
        self._num_cheap_asked = 0  # requests whose cheap members were asked in the last step
        self._step_s = 0.0  # elapsed, on average
        self._handed_over_s: float | None = None  # when the last step's drafts were handed over
        self._sum_expected, self._sum_accepted = 0.0, 0.0  # accepted tokens, with decay
        self._trust = 1.0  # accepted over expected, lately
        self._planned_skips = 0  # steps in which it need not be called: no request is due before
        self._num_skipped = 0  # of them, so far
        self._evaluates = True  # is the pass under way evaluated?
        self._evaluated_step = -1  # the last step that was evaluated
        self._expected = 0.0  # accepted tokens expected of the pass under way
        self._totals = {"steps": 0, "asked": 0, "drafted_nodes": 0, "offered_nodes": 0}
        self._own_s = self._step_own_s = 0.0  # in all steps, and in the last one
        self._last: Selection | None = None
        self._cheap_judged = Inequality()  # per request and step in which the cheap members are asked for it
        self._num_requests = 0  # in the batch, when it was last evaluated
        self._reasons: Counter[str] = Counter()  # reason -> steps

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
        self._learn_cost(step, begin_s)
        for request in step.gone:
            self._records.pop(request.request_id, None)
        end_s, batch_before_s = self.clock(), self.choice.batch_s
        self._own_s += end_s - begin_s
        self.drafters.observe(step)
        if self._num_cheap_asked:
            self._learn_s = self.clock() - begin_s - (self.choice.batch_s - batch_before_s)

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        begin_s = self.clock()
        requests = step.requests
        if self._num_skipped:
            self._totals["steps"] += self._num_skipped
            self._reasons["skipped"] += self._num_skipped
        now = self._totals["steps"]
        self._evaluates = self.choice.has_trial or now % EVALUATE_EVERY == 0 or len(requests) > self._num_requests
        if self._evaluates:
            num_running = sum([verified.request.status is RequestStatus.RUNNING for verified in step.passes])
            self._num_requests = max(num_running, len(requests))
            num_steps, self._evaluated_step = now - self._evaluated_step, now
            self.choice.begin_step(num_steps * self._step_s, num_steps)
        choice = self.choice
        records = [self._record(request) for request in requests]
        takes_skipped = now >= self._ask_skipped_at
        due = []
        if choice.has_cheap:
            due = [i for i, record in enumerate(records) if takes_skipped or not record.is_skipped]
        asked = list(range(len(requests))) if choice.asks_batch else due
        choice.not_due = NO_REQUESTS if asked == due else set(asked).difference(due)
        self._num_cheap_asked = len(due)
        choice.skips_cheap = not due
        alone = None if due or self._evaluates else choice.pays_alone
        if alone is not None:
            trees, draft_s = self._pass_on(alone, step, budgets)
        else:
            drafted, draft_s = self._ask(step, budgets, asked)
            trees = self._choose(requests, asked, drafted, draft_s)
        if takes_skipped and due:
            self._put_off(records, now)
        can_skip = choice.all_skipped and all(record.is_skipped for record in records)
        self._planned_skips, self._num_skipped = max(0, self._ask_skipped_at - now - 1) if can_skip else 0, 0
        self._handed_over_s = self.clock()
        self._step_own_s = self._handed_over_s - begin_s - draft_s
        self._own_s += self._step_own_s
        self._totals["steps"] += 1
        return trees

    def report(self) -> dict[str, Any]:
        """What it knows and what it decided last, for statistics and the server's page."""
        records = list(self._records.values())  # a snapshot: the engine's thread may be changing it
        num_skipped = sum(record.is_skipped for record in records)
        return {
            **self._totals,
            "own_s": self._own_s,
            "draft_s_per_request": self._draft_s,
            "requests_asked": len(records) - num_skipped,
            "requests_skipped": num_skipped,
            "trust": self._trust,
            "pass_cost_s": self.cost.table(),
            "members": self.choice.report(self._cheap_reason(len(records), num_skipped)),
            "reasons": dict(self._reasons),
            "last_decision": self._reason(),
        }

    # -- learning ----------------------------------------------------------------------------------------------------

    def _learn_cost(self, step: StepContext, now_s: float) -> None:
        if self._handed_over_s is None:
            return
        elapsed_s = now_s - self._handed_over_s
        self._handed_over_s = None
        if not self._evaluates:
            if not self.choice.all_skipped:
                self.choice.skip_evaluation()
            return
        num_decodes = num_rows = accepted = 0
        reads_prompt = False
        own = []
        for verified in step.passes:
            num_rows += len(verified.rows)
            reads_prompt = reads_prompt or verified.num_committed > 1
            if verified.logits_row >= 0:
                num_decodes += 1
                if verified.request.request_id in self._records:  # others chose a method for themselves
                    own.append(verified)
                    accepted += len(verified.accepted)
        if self._expected:
            self._sum_expected += self._expected - RATE * self._sum_expected
            self._sum_accepted += accepted - RATE * self._sum_accepted
        self._trust = (self._sum_accepted + 1.0 / RATE) / (self._sum_expected + 1.0 / RATE)
        if not num_decodes or elapsed_s <= 0.0 or reads_prompt:
            self.choice.skip_evaluation()
            return  # prompt rows have a cost of their own
        self._step_s += (RATE if self._step_s else 1.0) * (elapsed_s - self._step_s)
        self.cost.observe(num_rows, elapsed_s, num_decodes)
        plain_s = self.cost.at(num_decodes, num_decodes)
        num_more = max(num_decodes, num_rows - num_decodes)
        row_s = (self.cost.at(num_decodes + num_more, num_decodes) - plain_s) / num_more
        self.choice.judge(own, plain_s / num_decodes, row_s, self._num_cheap_asked)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _put_off(self, records: Sequence[RequestRecord], now: int) -> None:
        """Cheap members were asked for skipped requests too: so late again that it takes the share of the time that it
        may take."""
        num_skipped = sum([record.is_skipped for record in records])
        allowed_s = ALLOWANCE * max(self._step_s, 1e-9)
        self._ask_skipped_at = now + 1 + int(self._draft_s * num_skipped / allowed_s)

    def _record(self, request: Request) -> RequestRecord:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = RequestRecord(self._typical_value_s)
            record.is_skipped = self._typical_value_s <= MARGIN * self._draft_s
        return record

    def _ask(self, step: StepContext, budgets: Sequence[Budget], asked: Sequence[int]) -> tuple[list[DraftTree], float]:
        if not asked:
            self.choice.ask_none()
            return [], 0.0
        begin_s = self.clock()
        part = step
        if len(asked) < len(step.requests):
            part = replace(step, requests=[step.requests[i] for i in asked])
        given = []
        for i in asked:
            request, budget = step.requests[i], budgets[i]
            record = self._record(request)
            given.append(Budget(min(budget.num_nodes, record.room), budget.max_depth, *self.choice.min_probs))
        batch_before_s = self.choice.batch_s
        self.drafters.learns = self._evaluates
        trees = self.drafters.propose(part, given)
        spent_s = self.clock() - begin_s
        num_cheap_asked = self._num_cheap_asked
        if num_cheap_asked:
            cheap_s = spent_s + self._learn_s - (self.choice.batch_s - batch_before_s)
            if not self.choice.asks_batch:
                cheap_s += self._step_own_s  # deciding about them takes time as well
            cheap_s /= num_cheap_asked
            if self._draft_s:  # what past outputs take to be indexed, all at once, is not what one draft takes
                self._draft_s += RATE * (min(cheap_s, 1.5 * self._draft_s) - self._draft_s)
            else:
                self._draft_s = cheap_s
        else:  # only expensive members were asked: joining their trees is their cost
            beside_s = spent_s - (self.choice.batch_s - batch_before_s) + self._step_own_s
            is_seldom = self.choice.pays_alone is not None  # in other steps its trees are offered as they are
            self.choice.charge(beside_s / EVALUATE_EVERY if is_seldom else beside_s)
        self._totals["asked"] += len(asked)
        return trees, spent_s

    def _pass_on(self, member: str, step: StepContext, budgets: Sequence[Budget]) -> tuple[list[DraftTree], float]:
        """A step that is not evaluated, in which one expensive member drafts alone. Its trees are offered as they are:
        it was given the thresholds at which to stop."""
        begin_s = self.clock()
        given = [Budget(budget.num_nodes, budget.max_depth, *self.choice.min_probs) for budget in budgets]
        trees = self.drafters.propose_alone(member, step, given)
        num_drafted = sum([len(tree.token_ids) for tree in trees])
        self._reasons["pays" if num_drafted else "nothing_drafted"] += 1
        totals = self._totals
        totals["asked"] += len(trees)
        totals["drafted_nodes"] += num_drafted
        totals["offered_nodes"] += num_drafted
        return trees, self.clock() - begin_s

    def _choose(
        self,
        requests: Sequence[Request],
        asked: Sequence[int],
        drafted: Sequence[DraftTree],
        drafting_s: float,
    ) -> list[DraftTree]:
        trees = [EMPTY_TREE] * len(requests)
        self._expected = 0.0
        if not asked:
            self._reasons["skipped"] += 1
            return trees
        records = [self._records[requests[i].request_id] for i in asked]
        trust = self._trust
        chances = [path_chances(tree, trust) if tree.confidence is not None else [] for tree in drafted]
        selection = self._last
        if self._evaluates or selection is None:
            selection = self._last = self._select(chances, drafting_s)
            kept = selection.keep
        else:
            kept = above_bar(chances, selection.bar)
            self._reasons["pays" if any(kept) else "nothing_drafted"] += 1
        worth_it = kept  # by price
        if self._keeps_whole:  # then whether to ask at all is the choice
            selection = self._last = whole(selection, chances, self._num_requests, self.cost)
            kept = selection.keep
        choice = self.choice
        if self._evaluates:
            self._expected = selection.gain / max(trust, 1e-6)
            if choice.asks_batch:
                choice.expect(drafted, chances)
                choice.stop_at(selection.bar, selection.plain_s)
        num_drafted = num_offered = 0
        for i, record, tree, keep, priced in zip(asked, records, drafted, kept, worth_it, strict=True):
            num_nodes, num_kept = len(tree.token_ids), len(keep)
            num_drafted += num_nodes
            num_offered += num_kept
            record.follow(len(priced))
            # A tree sampled from a distribution of its own must not be pruned by what was drawn.
            if num_kept == num_nodes or tree.draft_probs is not None:
                trees[i] = tree
            elif keep:
                trees[i] = tree.keep(keep)
        self._totals["drafted_nodes"] += num_drafted
        self._totals["offered_nodes"] += num_offered
        if self._num_cheap_asked:
            # Without their drafts a token would cost what it costs with the expensive members' alone, or plainly.
            token_s = selection.token_s if choice.asks_batch else selection.plain_s / self._num_requests
            self._judge_cheap(records, drafted, kept, chances, token_s, selection.row_s)
        return trees

    def _select(self, chances: Sequence[Sequence[float]], drafting_s: float) -> Selection:
        """What pays, and why nothing does."""
        selection = select(chances, self._num_requests, self.cost, MARGIN, drafting_s)
        if selection.num_nodes:
            self._reasons["pays"] += 1
        elif self._keeps_whole and any(chances):
            self._reasons["probe"] += 1
        else:
            self._reasons["too_expensive" if any(chances) else "nothing_drafted"] += 1
        return selection

    def _judge_cheap(
        self,
        records: Sequence[RequestRecord],
        drafted: Sequence[DraftTree],
        kept: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
        token_s: float,
        row_s: float,
    ) -> None:
        """Was it worth asking the cheap members? Where it was not, the request is skipped."""
        choice = self.choice
        for position, (record, tree, keep) in enumerate(zip(records, drafted, kept, strict=True)):
            if position in choice.not_due:
                continue
            nodes = keep
            if choice.asks_batch:  # what an expensive member drafted too would be there without the cheap ones
                nodes = [node for node in keep if choice.is_cheap(tree.members[node])]
            gain = sum([chances[position][node] for node in nodes])
            rows_s = len(nodes) * row_s
            self._cheap_judged.learn(RATE, gain, rows_s + self._draft_s, token_s)
            self._judge(record, gain * token_s - rows_s)

    def _judge(self, record: RequestRecord, saved_s: float) -> None:
        most_s = MAX_VALUE * self._draft_s
        value_s = min(most_s, saved_s)
        typical_s = min(most_s, self._typical_value_s)
        self._typical_value_s = typical_s + RATE * (value_s - typical_s)
        before_s = min(most_s, record.value_s)
        record.value_s = max(value_s, before_s + RATE * (value_s - before_s))
        record.is_skipped = record.value_s <= MARGIN * self._draft_s

    def _cheap_reason(self, num_requests: int, num_skipped: int) -> Reason:
        """What decides about the cheap members."""
        judged = self._cheap_judged
        is_used = self._typical_value_s > MARGIN * self._draft_s  # as for a new request
        decision = "on" if is_used else "off"
        if num_requests:
            is_used = num_skipped < num_requests
            decision = f"on for {num_requests - num_skipped} of {num_requests} requests" if is_used else "off"
        num_cheap = sum(member.state == "cheap" for member in self.choice.members.values())
        return judged.reason(decision, is_used, "gained" if num_cheap == 1 else "gained by the cheap ones")

    def _reason(self) -> str:
        last = self._last
        if last is None:
            return "nothing asked yet"
        batch = f"{self._num_requests} request{'s' if self._num_requests != 1 else ''}"
        if last.num_nodes == 0:
            return f"off: no draft for {batch} is expected to save more than it costs"
        return (
            f"{last.num_nodes} nodes for {batch}: {last.gain:.2f} more tokens for "
            f"{(last.pass_s / last.plain_s - 1):.0%} more time, {last.speedup:.2f}x"
        )


def alone(config: "SpeculativeConfig", services: EngineParts, largest: Budget) -> AutoProposer:
    """A method by itself, at the sizes that pay: the only member, or `merge`'s own members."""
    if config.method == "merge":
        return AutoProposer(services, largest, members=config.options["members"], credit=config.options["credit"])
    return AutoProposer(services, largest, members=[config])
