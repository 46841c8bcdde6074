"""`auto`: drafts where drafting pays, as measured live, and nowhere else. docs/auto.md explains it.

One rule for everything: let the batch's present tokens per second be the price of a second; a node, a level, a drafter
or a trial is bought iff it is expected to bring more tokens than its seconds are worth.

    cost.py         what a drafter's call takes, and the price of a second
    acceptance.py   the chance of a node
    choose.py       which nodes are worth their rows; ask.py: who is worth asking
    explore.py      what asking brings, and the bucket that pays for finding out

Leaving nodes out is exact: with sample-match verification the output does not depend on which nodes were offered.

    LLM(model, {"method": "auto"})                                the default
    LLM(model, {"method": "auto", "members": ["ngram", "suffix"], "node_budget": 16})   limits by hand
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.ask import Asking
from paceline.spec.auto.choose import Choice, choose
from paceline.spec.auto.constants import LASTING, LEARN_EVERY, PASSAGE, SHARE, TRIED, UNSURE
from paceline.spec.auto.cost import Market
from paceline.spec.auto.drafter import Drafter
from paceline.spec.auto.explore import Bucket
from paceline.spec.engine_parts import EngineParts
from paceline.spec.kept_state import Memory, numbers, restore, states
from paceline.spec.merge.merge import side_by_side
from paceline.spec.merge.pool import PRICES, Draft, draft_of, join
from paceline.spec.pass_calibration import calibrate
from paceline.spec.proposer import Budget, Proposer, StepContext, union

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig

NO_GAINS = [0.0] * len(PRICES)


class AutoProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        members: "Sequence[SpeculativeConfig] | None" = None,  # None: all that this target has
        remember: bool = True,
    ) -> None:
        from paceline.spec.default_members import build_members  # reads the table, which has a row for this file

        self.members = build_members(services, largest, members)
        self.drafters = {name: Drafter(name, proposer) for name, proposer in self.members.proposers.items()}
        self.clock: Callable[[], float] = time.perf_counter
        self.bucket = Bucket()
        self._launches_ahead = bool(services.pass_sizes)
        self.market = Market(PassCostModel(calibrate(services), services.pass_sizes), self._launches_ahead)
        self._asking = Asking(self.drafters, self.bucket)
        self._drafts: dict[str, Draft] = {}  # request id -> what was drafted for it last
        self._learns = True
        self._drafted_in = 0  # the last step whose pass verified a node
        self._handed_over_s: float | None = None  # when the last step was left to the engine
        self._drafting_s = self._own_s = 0.0  # of all after the last pass; and of the controller in all steps
        self._num_to_skip = self._num_skipped = 0
        self._compare_at = 0
        self._intervals: list[float] | None = []  # what the skipped steps took; None: their requests changed
        self._totals = {"steps": 0, "asked": 0, "drafted_nodes": 0, "offered_nodes": 0}
        self._reasons: Counter[str] = Counter()  # reason -> steps
        self._last: Choice | None = None
        self._memory = Memory(services if remember else None)
        self._restore(self._memory.load())
        self._set_needs()

    def check_params(self, params: SamplingParams) -> None:
        self.members.check_params(params)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.members.use_clock(clock)

    def member_figures(self) -> dict[str, dict[str, Any]]:
        return self.members.figures()

    def _set_needs(self) -> None:
        """For the next pass: of those who are told of it."""
        self._told = [one.is_told for one in self.drafters.values()]
        self.needs = union([one.proposer.needs for one in self.drafters.values() if one.is_told or not one.watches])

    # -- steps that are skipped --------------------------------------------------------------------------------------

    def skips_next_step(self) -> bool:
        return self._num_skipped < self._num_to_skip

    def skip_step(self) -> None:
        self._note_interval()
        self._num_skipped += 1

    def _note_interval(self) -> None:
        now_s = self.clock()
        if self._intervals is not None and self._num_skipped and self._handed_over_s is not None:
            self._intervals.append(now_s - self._handed_over_s)
        self._handed_over_s = now_s

    def _steps_to_skip(self) -> int:
        """Where nobody is asked or told anything: until the bucket holds what is to be tried next, and what it takes to
        think of it, as this step did in vain."""
        awake_s, next_loss_s = self.market.awake_s, self._asking.next_loss_s
        self.bucket.pay(awake_s)
        if any(one.watches and one.is_told for one in self.drafters.values()):
            return 0
        lacks_s = awake_s + (next_loss_s or 0.0) - self.bucket.saved_s
        least = PASSAGE if next_loss_s is None else 1  # before that nothing will look any different
        return int(min(4 * LASTING, max(least, lacks_s / (SHARE * self.market.plain_s))))

    def _steps_to_compare(self) -> int:
        """Where passes can be launched ahead, some steps are skipped even if drafting seems to pay, to see what they
        take: at once, and then ever more rarely."""
        if not self._launches_ahead or self.market.step < self._compare_at:
            return 0
        self._compare_at = min(max(2 * self.market.step, LASTING // 4), self.market.step + 16 * LASTING)
        return TRIED

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, step: StepContext) -> None:
        begin_s = self.clock()
        self.members.faults.end_step()
        if self._num_skipped:  # the batch has changed
            self._intervals = None
            if self.bucket.saved_s > self.market.awake_s:
                self._num_to_skip = 0
        elif self._handed_over_s is not None:
            self._learn_cost(step, begin_s - self._handed_over_s)
            self._handed_over_s = None
        if self._drafts:
            for verified in step.passes:
                draft = self._drafts.get(verified.request.request_id)
                if draft is not None and (self._learns or self.drafters[draft.members[0][0]].acceptance.is_new):
                    for name, outcomes in draft.outcomes(verified.new_token_ids).items():
                        self.drafters[name].acceptance.learn(verified.request.request_id, outcomes)
            self._drafts = {}
        for request in step.gone:
            for drafter in self.drafters.values():
                drafter.forget(request.request_id)
        self._own_s += self.clock() - begin_s
        for name, drafter in self.drafters.items():
            if not self._num_skipped and (drafter.is_told if drafter.watches else drafter.is_asked):
                drafter.told_s = self.members.tell(name, step)
            elif step.gone:
                self.members.forget(name, step.gone)
            drafter.is_asked = False

    def _learn_cost(self, step: StepContext, elapsed_s: float) -> None:
        self.bucket.earn(elapsed_s + self._drafting_s, self.market.plain_s)
        count = num_rows = num_tokens = 0
        for verified in step.passes:
            if verified.num_committed > 1:
                return  # prompt rows have a cost of their own
            num_rows += len(verified.rows)
            if verified.logits_row >= 0:
                count += 1
                num_tokens += len(verified.new_token_ids)
        if not count or elapsed_s <= 0.0:
            return
        market = self.market
        self._drafted_in = market.step if num_rows > count else self._drafted_in
        if self._learns:
            market.learn_step(num_rows, elapsed_s, count)
        seconds = market.passes.at(num_rows, count) + market.wait_s + self._drafting_s
        market.learn_rate(num_tokens / count, seconds)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        if not step.requests:
            return []
        begin_s = self.clock()
        requests, market = step.requests, self.market
        self._begin_step(step)
        drafts: dict[int, list[Draft]] = {}  # by index of the request
        rest = [1.0] * len(requests)
        draft_s, asked_s, num_asked = 0.0, 0.0, 0
        for drafter in self._asking.begin(requests, market, self._learns):
            asked = self._asking.whom(drafter, rest, market)
            if asked:
                num_asked += 1
                part, given = step, budgets
                if len(asked) < len(requests):
                    part, given = replace(step, requests=[requests[i] for i in asked]), [budgets[i] for i in asked]
                drafted, drafter_s, asking_s = self._ask(drafter, part, given)
                draft_s += drafter_s
                asked_s += asking_s
                for i, draft in zip(asked, drafted, strict=True):
                    if draft is not None:
                        drafts.setdefault(i, []).append(draft)
                        rest[i] *= 1.0 - draft.first_chance
        if drafts:
            offered = self._offer(requests, budgets, drafts)
        else:
            offered = [EMPTY_TREE] * len(requests)
            self._reasons["nothing_drafted" if num_asked else "skipped"] += 1
        self._num_to_skip = self._steps_to_compare() if num_asked else self._steps_to_skip()
        if [one.is_told for one in self.drafters.values()] != self._told:
            self._set_needs()
        self._handed_over_s = self.clock()
        self._drafting_s = self._handed_over_s - begin_s
        self._own_s += self._drafting_s - draft_s
        if market.step > 1:  # the first step wakes caches
            market.own_s += (self._drafting_s - asked_s - market.own_s) / PASSAGE
        return offered

    def _begin_step(self, step: StepContext) -> None:
        market, skipped = self.market, self._num_skipped
        count = max(sum([one.request.status is RequestStatus.RUNNING for one in step.passes]), len(step.requests))
        market.step += 1 + skipped
        self._totals["steps"] += 1 + skipped
        if skipped:
            self._note_interval()
            self._num_skipped = 0
            self._reasons["skipped"] += skipped
            self.bucket.earn(skipped * market.plain_s, market.plain_s)
            if self._intervals and count == market.num_requests:
                market.learn_skipped(self._intervals)
            market.learn_rate(1.0, market.plain_s, skipped)
            self._intervals = []
        is_new = market.step * max(4, market.num_requests) < LASTING
        self._learns = skipped > 0 or is_new or market.step % LEARN_EVERY == 0
        if self._learns:
            self._memory.save_when_due(self.bucket.run_s, self._state)
        if self._learns or count != market.num_requests:  # else nothing was learned since
            market.quote(count)

    def _ask(
        self, drafter: Drafter, step: StepContext, budgets: Sequence[Budget]
    ) -> tuple[list[Draft | None], float, float]:
        """Its drafts for all requests of the step, rated; the time that it took itself, and with rating."""
        begin_s = self.clock()
        market, requests, gains = self.market, step.requests, drafter.gain.requests
        few, bar, further, much = drafter.limits
        given = []
        for request, (nodes, depth, *_) in zip(requests, budgets, strict=True):
            own = gains.get(request.request_id)
            if nodes > few and (own is None or own.value <= much):
                nodes = few
            given.append(Budget(nodes, depth, bar, further))
        missed = market.step - drafter.gain.step - LEARN_EVERY
        if missed > 0:
            drafter.acceptance.estimate.age(missed, LASTING)
        trees, spent_s = self.members.ask(drafter.name, step, given)
        is_tried = drafter.verdict.decision == "tried"
        if is_tried and drafter.num_asked:  # of the first call nobody could know what it would take
            self.bucket.pay(max(0.0, spent_s - drafter.verdict.seconds))
        is_learned = self._learns or is_tried
        drafts: list[Draft | None] = []
        deepest = 0
        for request, tree in zip(requests, trees, strict=True):
            name, draft = request.request_id, None
            if tree.token_ids:
                draft = draft_of(drafter.name, tree, name, drafter.acceptance, drafter.proposer.keeps_whole)
                drafter.first_chance += (draft.first_chance - drafter.first_chance) / PASSAGE
                deepest = max(deepest, draft.depth)
            drafts.append(draft)
            if is_learned or draft is not None:
                of_draft = NO_GAINS if draft is None else draft.gains()
                drafter.gain.learn_of(name, market.at_row_price(of_draft), market.step)
                if is_learned:
                    drafter.gain.learn(of_draft, market, drafter.acceptance.is_new)
        asking_s = self.clock() - begin_s
        if is_learned:
            drafter.cost.learn(asking_s + drafter.told_s, len(requests), deepest, market.unit_s)
        drafter.num_asked += 1
        self._totals["asked"] += len(requests)
        return drafts, spent_s, asking_s

    def _offer(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drafts: dict[int, list[Draft]]
    ) -> list[DraftTree]:
        market, offered = self.market, [EMPTY_TREE] * len(requests)
        joined = [join(of_request) for of_request in drafts.values()]
        chances = [draft.chances for draft in joined]
        # Where no draft was verified for long, rows may cost less than they seem to.
        price = max(UNSURE, 0.5 ** ((market.step - self._drafted_in) / LASTING)) * market.tokens_per_s
        choice = choose(chances, market.num_requests, market.passes, price)
        for (i, of_request), draft, keep in zip(drafts.items(), joined, choice.keep, strict=True):
            self._drafts[requests[i].request_id] = draft
            whole = {one.members[0][0]: one.whole for one in of_request if one.whole is not None}
            if whole:
                is_worth_it = sum(draft.chances) > market.row_price * len(draft.chances)
                if is_worth_it or any(one.draft_probs is not None for one in whole.values()):
                    offered[i] = side_by_side(whole, budgets[i])
            elif keep:
                offered[i] = draft.tree(keep[: budgets[i].num_nodes])
            self._totals["drafted_nodes"] += len(draft.chances)
            self._totals["offered_nodes"] += len(offered[i])
        self._reasons["pays" if choice.num_nodes else "too_expensive"] += 1
        self._last = choice
        return offered

    # -- what is kept, and what is said ------------------------------------------------------------------------------

    def _restore(self, known: dict[str, Any]) -> None:
        self.market.passes.restore(numbers(known.get("pass_cost"), self.market.passes.num_knots))
        drafters = known.get("drafters")
        for name, drafter in self.drafters.items():
            restore(drafter.kept, drafters.get(self.members.keys[name]) if isinstance(drafters, dict) else None)

    def _state(self) -> dict[str, Any]:
        used = {self.members.keys[name]: states(one.kept) for name, one in self.drafters.items() if one.num_asked}
        return {"pass_cost": self.market.passes.state(), "drafters": used}

    def report(self) -> dict[str, Any]:
        """What it knows and what it decided last, for statistics and the server's page."""
        seconds = self.members.seconds
        return {
            **self._totals,
            "steps": self._totals["steps"] + self._num_skipped,
            "own_s": self._own_s,
            "wait_s": self.market.wait_s,
            "exploration_s": self.bucket.lost_s,
            "pass_cost_s": self.market.passes.table(),
            "members": {name: one.report() | {"seconds": seconds[name]} for name, one in self.drafters.items()},
            "reasons": dict(self._reasons),
            "last_decision": self._said(),
        }

    def _said(self) -> str:
        choice, market = self._last, self.market
        if choice is None:
            return "nothing asked yet"
        if not choice.num_nodes:
            return f"off: no draft for {market.num_requests} running is expected to save more than it costs"
        worth, share = market.tokens_per_s * choice.seconds, choice.seconds / market.plain_s
        more = f"{choice.tokens:.2f} more tokens for {share:.0%} more time, which is worth {worth:.2f} tokens"
        return f"{choice.num_nodes} nodes for {market.num_requests} running: {more}"
