"""`auto`: drafts where drafting pays, as measured live, and nowhere else. docs/auto.md explains it.

One rule for everything: let the batch's present tokens per second be the price of a second; a node, a level, a drafter
or a trial is bought iff it is expected to bring more tokens than its seconds are worth.

    cost.py      the price of a second and of a row; which paths are worth their rows
    choose.py    who is worth asking, for the next few steps; drafter.py: what is known of each
    explore.py   what asking brings, and the bucket that pays for finding out

What passes take, what calls take and what is accepted is learned in lab/live_*.py.

Leaving nodes out is exact: with sample-match verification the output does not depend on which nodes were offered.

    LLM(model, {"method": "auto"})                                the default
    LLM(model, {"method": "auto", "members": ["ngram", "suffix"], "node_budget": 16})   limits by hand
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.core.block_rows import BlockRows
from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.choose import Plan
from paceline.spec.auto.constants import LASTING, PASSAGE, PLAN_EVERY, SHARE
from paceline.spec.auto.cost import Market
from paceline.spec.auto.drafter import Drafter
from paceline.spec.auto.explore import Bucket
from paceline.spec.engine_parts import EngineParts
from paceline.spec.kept_state import Memory, numbers, restore, states
from paceline.spec.merge.merge import side_by_side
from paceline.spec.merge.pool import PRICES, Draft, gains, join, rate
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
        self.market = Market(PassCostModel(calibrate(services)))
        self.plan = Plan(self.drafters, self.bucket)
        self._drafts: dict[
            str, list[Draft]
        ] = {}  # request id -> what was drafted for it, in steps that are learned from
        self._learns = True
        self._handed_over_s: float | None = None  # when the last step was left to the engine
        self._drafting_s = self._own_s = 0.0  # of all after the last pass; and of the controller in all steps
        self._num_to_skip = self._num_skipped = 0
        self._sums = [0.0] * 3  # since the rate was learned last: tokens per request, seconds, steps
        self._totals = {"steps": 0, "asked": 0, "drafted_nodes": 0, "offered_nodes": 0}
        self._reasons: Counter[str] = Counter()  # reason -> steps
        self._memory = Memory(services if remember else None)
        self._restore(self._memory.load())
        self._set_needs()

    def check_params(self, params: SamplingParams) -> None:
        self.members.check_params(params)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.members.use_clock(clock)

    def block_rows(self) -> Sequence[BlockRows]:
        return self.members.block_rows()

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
        self._num_skipped += 1

    def _steps_to_skip(self) -> int:
        """Where nobody is asked or told anything: until the bucket holds what is to be tried next, and what it takes to
        think of it, as this step did in vain."""
        if not self.plan.is_idle:
            return 0
        own_s, next_loss_s = self._drafting_s, self.plan.next_loss_s
        self.bucket.pay(own_s)
        lacks_s = own_s + (next_loss_s or 0.0) - self.bucket.saved_s
        least = PASSAGE if next_loss_s is None else 1  # before that nothing will look any different
        return int(min(LASTING, max(least, lacks_s / (SHARE * self.market.plain_s))))

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, step: StepContext) -> None:
        begin_s = self.clock()
        self.members.faults.end_step()
        if self._num_skipped:  # the batch has changed
            self._num_to_skip = 0
        elif self._handed_over_s is not None:
            self._learn_step(step, begin_s - self._handed_over_s)
        if self._drafts:
            for verified in step.passes:
                for draft in self._drafts.get(verified.request.request_id, ()):
                    acceptance = self.drafters[draft.name].acceptance
                    acceptance.learn(draft.tree.token_ids, draft.tree.parents, draft.buckets, verified.new_token_ids)
            self._drafts = {}
        gone = step.gone
        for request in gone:
            for drafter in self.drafters.values():
                drafter.forget(request.request_id)
        self._own_s += self.clock() - begin_s
        for name, drafter in self.drafters.items():
            if (drafter.is_told if drafter.watches else drafter.is_asked) and not self._num_skipped:
                told_s = self.members.tell(name, step)
                drafter.told_s += (min(told_s, 4.0 * drafter.told_s or told_s) - drafter.told_s) / PASSAGE
                drafter.is_asked = False
            elif gone:
                self.members.forget(name, gone)

    def _learn_step(self, step: StepContext, elapsed_s: float) -> None:
        """What the last pass took and brought."""
        self.bucket.earn(elapsed_s + self._drafting_s, self.market.plain_s)
        self._handed_over_s = None
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
        passes, sums = self.market.passes, self._sums
        if self._learns:
            passes.observe(num_rows, elapsed_s, count)
        sums[0] += num_tokens / count
        sums[1] += passes.at(num_rows, count) + self._drafting_s
        sums[2] += 1.0

    # -- deciding ----------------------------------------------------------------------------------------------------

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        requests, plan = step.requests, self.plan
        if not requests:
            return []
        begin_s = self.clock()
        self._begin_step(step, begin_s)
        offered = [EMPTY_TREE] * len(requests)
        drafts: dict[int, list[Draft]] = {}  # by index of the request
        rest: list[float] | None = None  # by request: the chance that nobody asked so far has the next token
        draft_s, was_asked = 0.0, False
        for drafter in plan.active:
            asked = self._whom(drafter, rest)
            if not asked:
                continue
            was_asked = True
            part, given = step, budgets
            if len(asked) < len(requests):
                part, given = replace(step, requests=[requests[i] for i in asked]), [budgets[i] for i in asked]
            drafted, drafter_s = self._ask(drafter, part, given)
            draft_s += drafter_s
            for i, draft in zip(asked, drafted, strict=True):
                if draft is not None:
                    drafts.setdefault(i, []).append(draft)
                    if rest is None:
                        rest = [1.0] * len(requests)
                    rest[i] *= 1.0 - draft.first_chance
        if drafts:
            self._offer(requests, budgets, drafts, offered)
        else:
            self._reasons["nothing_drafted" if was_asked else "skipped"] += 1
        if plan.is_new:
            self._memory.save_when_due(self.bucket.run_s, self._state)
            if [one.is_told for one in self.drafters.values()] != self._told:
                self._set_needs()
        self._handed_over_s = self.clock()
        self._drafting_s = self._handed_over_s - begin_s
        self._own_s += self._drafting_s - draft_s
        self._num_to_skip = self._steps_to_skip()
        return offered

    def _begin_step(self, step: StepContext, now_s: float) -> None:
        market, skipped, sums = self.market, self._num_skipped, self._sums
        if skipped:
            self._num_skipped = 0
            self._totals["steps"] += skipped
            self._reasons["skipped"] += skipped
            self.bucket.earn(skipped * market.plain_s, market.plain_s)
            for i, value in enumerate((1.0, market.plain_s, 1.0)):
                sums[i] += skipped * value
        market.step += 1 + skipped
        self._totals["steps"] += 1
        self._learns = market.step % PLAN_EVERY == 0 or market.step < LASTING // 4 or skipped > 0
        if sums[2] >= PLAN_EVERY and sums[1] > 0.0:
            market.learn_rate(*sums)
            self._sums = [0.0] * 3
        count = len(step.requests)
        if len(step.passes) > count:
            count = max(count, sum([one.request.status is RequestStatus.RUNNING for one in step.passes]))
        self.plan.follow(step.requests, count, market)

    def _whom(self, drafter: Drafter, rest: Sequence[float] | None) -> list[int]:
        """Requests that it is asked for in this step."""
        step, plan = self.market.step, self.plan
        if not drafter.is_ready(step):
            return []
        asked = drafter.asked
        if rest is not None and asked:
            asked = drafter.worth_asking(rest, self.market.tokens_per_s)
        if drafter.tried and (plan.is_new or drafter.tried_until >= step):
            asked = asked + [one for one in drafter.tried if one not in asked]
        indices = [one.request for one in asked]
        if len(indices) > 1:
            indices.sort()
        return indices

    def _ask(self, drafter: Drafter, step: StepContext, budgets: Sequence[Budget]) -> tuple[list[Draft | None], float]:
        """Its drafts for all requests of the step, rated; and the time that it took itself."""
        begin_s = self.clock()
        market, name, of_requests, learns = (
            self.market,
            drafter.name,
            drafter.gain.requests,
            self._learns or bool(drafter.tried),
        )
        few, further, much = drafter.limits
        given = []
        for request, (nodes, depth, *_) in zip(step.requests, budgets, strict=True):
            own = of_requests.get(request.request_id)
            if nodes > few and (own is None or own.value <= much):
                nodes = few
            given.append(Budget(nodes, depth, 0.0, further))
        missed = market.step - drafter.gain.step - PLAN_EVERY
        if missed > 0:
            drafter.acceptance.age(missed)
        trees, spent_s = self.members.ask(name, step, given)
        table = drafter.acceptance.chances
        drafts: list[Draft | None] = []
        deepest = 0
        for request, tree in zip(step.requests, trees, strict=True):
            draft = None
            if tree.token_ids:
                draft = rate(name, tree, table)
                if learns:
                    deepest = max(deepest, *tree.depths())
                    self._drafts.setdefault(request.request_id, []).append(draft)
            else:
                drafter.gain.learn(request.request_id, NO_GAINS, market, drafter.memory)
            drafts.append(draft)
        asking_s, price_s = self.clock() - begin_s + drafter.told_s, drafter.call_s + drafter.each_s * len(trees)
        is_surprise = asking_s > 2.0 * price_s
        if learns or is_surprise:
            drafter.cost.learn(asking_s, len(trees), deepest, market.unit_s)
        if is_surprise and drafter.num_asked:  # of the first call nobody could know what it would take
            self.plan.renew(asking_s - price_s)
        drafter.is_asked = True
        drafter.num_asked += 1
        self._totals["asked"] += len(trees)
        return drafts, spent_s

    def _offer(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        drafts: dict[int, list[Draft]],
        offered: list[DraftTree],
    ) -> None:
        price, num_drafted, num_offered = self.market.row_price, 0, 0
        joined = []
        for i, of_request in drafts.items():
            joined.append(of_request[0] if len(of_request) == 1 else join(of_request))
            self._learn_gains(requests[i].request_id, of_request, joined[-1])
        bar = self.market.bar([chance for draft in joined for chance in draft.chances if chance > 0.03])
        for (i, of_request), draft in zip(drafts.items(), joined, strict=True):
            whole = {one.name: one.tree for one in of_request if self._is_whole(one)}
            num_drafted += len(draft.chances)
            if whole:
                is_worth_it = sum(draft.chances) > price * len(draft.chances)
                # What was drawn from a distribution of its own must not decide what is offered.
                if is_worth_it or any(tree.draft_probs is not None for tree in whole.values()):
                    offered[i] = side_by_side(whole, budgets[i])
            else:
                offered[i] = draft.offer(bar, budgets[i].num_nodes)
            num_offered += len(offered[i].token_ids)
        self._totals["drafted_nodes"] += num_drafted
        self._totals["offered_nodes"] += num_offered
        self._reasons["pays" if num_offered else "too_expensive"] += 1

    def _learn_gains(self, request_id: str, drafts: Sequence[Draft], joined: Draft) -> None:
        """A draft beside a better one brings what they bring together beyond that one's."""
        market, own = self.market, [gains(draft.chances) for draft in drafts]
        if len(drafts) > 1:
            values = [market.at_row_price(one) for one in own]
            best = own[values.index(max(values))]
            added = [max(0.0, all_of - of_best) for all_of, of_best in zip(gains(joined.chances), best, strict=True)]
            own = [one if one is best else added for one in own]
        for draft, found in zip(drafts, own, strict=True):
            drafter = self.drafters[draft.name]
            drafter.gain.learn(request_id, found, market, drafter.memory)

    def _is_whole(self, draft: Draft) -> bool:
        return draft.tree.draft_probs is not None or self.drafters[draft.name].proposer.keeps_whole

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
            "exploration_s": self.bucket.lost_s,
            "tokens_per_s": self.market.tokens_per_s,
            "row_price_tokens": self.market.row_price,
            "pass_cost_s": self.market.passes.table(),
            "members": {name: one.report() | {"seconds": seconds[name]} for name, one in self.drafters.items()},
            "reasons": dict(self._reasons),
            "last_decision": self._said(),
        }

    def _said(self) -> str:
        market, (nodes, tokens, seconds) = self.market, self.market.bought
        if not market.num_requests:
            return "nothing asked yet"
        if not nodes:
            return f"off: no draft for {market.num_requests} running is expected to save more than it costs"
        worth, share = market.tokens_per_s * seconds, seconds / market.plain_s
        more = f"{tokens:.2f} more tokens for {share:.0%} more time, which is worth {worth:.2f} tokens"
        return f"{nodes} nodes for {market.num_requests} running: {more}"
