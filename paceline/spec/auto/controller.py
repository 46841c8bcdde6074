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
from paceline.spec.auto.constants import FEW_NODES, LASTING, LEARN_EVERY, MOST_SKIPPED, PASSAGE, SHARE, START_S, UNSURE
from paceline.spec.auto.cost import Market, Price
from paceline.spec.auto.drafter import Drafter
from paceline.spec.auto.explore import Bucket
from paceline.spec.engine_parts import EngineParts
from paceline.spec.kept_state import load, numbers, save, state_path
from paceline.spec.merge.merge import side_by_side
from paceline.spec.merge.pool import Draft, draft_of, join
from paceline.spec.pass_calibration import calibrate
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext, union

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig


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
        self.cost = PassCostModel(calibrate(services), services.pass_sizes)
        self.bucket, self.price = Bucket(), Price()
        self._asking = Asking(self.drafters, self.bucket)
        self._acceptance = {name: drafter.acceptance for name, drafter in self.drafters.items()}
        self._step = self._drafted_in = 0  # the present step, and the last one whose pass verified a node
        self._drafts: dict[str, Draft] = {}  # request id -> what was drafted for it last
        self._handed_over_s: float | None = None  # when the last step's drafts were handed over
        self._step_s = self._drafting_s = self._own_s = 0.0  # of the last pass; of all after it; and of all steps
        self._beside_s = 0.0  # own time of a step in which somebody was asked, for each of them
        self._learns = True
        # Of the steps since the price was learned: their number, tokens and rows of a request, and drafting time
        self._since = [0.0] * 4
        self._needs_when: dict[tuple[bool, ...], Needs] = {}  # who is told -> what they need
        self._today: Market | None = None
        self._num_to_skip = self._num_skipped = 0
        self._totals = {"steps": 0, "asked": 0, "drafted_nodes": 0, "offered_nodes": 0}
        self._reasons: Counter[str] = Counter()  # reason -> steps
        self._last: tuple[Choice, Market] | None = None
        self._kept_in = state_path(services) if remember else None
        self._save_at_s = START_S
        self._restore(load(self._kept_in))

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # read only: it follows who is told of passes
        told = tuple([not one.watches or self._step <= one.told_until for one in self.drafters.values()])
        needs = self._needs_when.get(told)
        if needs is None:
            members = zip(self.drafters.values(), told, strict=True)
            needs = self._needs_when[told] = union([one.proposer.needs for one, is_told in members if is_told])
        return needs

    def check_params(self, params: SamplingParams) -> None:
        self.members.check_params(params)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.members.use_clock(clock)

    def skips_next_step(self) -> bool:
        return self._num_skipped < self._num_to_skip

    def skip_step(self) -> None:
        self._num_skipped += 1

    def member_figures(self) -> dict[str, dict[str, Any]]:
        return self.members.figures()

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, step: StepContext) -> None:
        begin_s = self.clock()
        self.members.faults.end_step()
        if self._handed_over_s is not None and not self._num_skipped:  # else the pass began several steps ago
            self._learn_cost(step, begin_s - self._handed_over_s)
            self._handed_over_s = None
        if self._drafts:
            for verified in step.passes:
                draft = self._drafts.get(verified.request.request_id)
                if draft is not None and (self._learns or self._acceptance[draft.members[0][0]].is_new):
                    self._learn_outcomes(verified.request.request_id, draft, verified.new_token_ids)
            self._drafts = {}
        for request in step.gone:
            for drafter in self.drafters.values():
                drafter.forget(request.request_id)
        self._own_s += self.clock() - begin_s
        for name, drafter in self.drafters.items():
            if self._step <= drafter.told_until if drafter.watches else drafter.verdict.num_requests:
                drafter.told_s = self.members.tell(name, step)
            else:
                drafter.told_s = self.members.forget(name, step.gone) if step.gone else 0.0

    def _learn_cost(self, step: StepContext, elapsed_s: float) -> None:
        self.bucket.earn(elapsed_s + self._drafting_s, elapsed_s)
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
        self._step_s = elapsed_s
        if num_rows > count:
            self._drafted_in = self._step
        since = self._since
        since[0] += 1.0
        since[1] += num_tokens / count
        since[2] += num_rows / count
        since[3] += self._drafting_s
        if self._learns:
            self.cost.observe(num_rows, elapsed_s, count)
            steps, tokens, rows, drafting_s = since
            seconds = self.cost.at(round(rows * count / steps), count) + drafting_s / steps
            self.price.learn(tokens / steps, seconds / self.cost.at(count, count), int(steps))
            self._since = [0.0] * 4

    def _learn_outcomes(self, request_id: str, draft: Draft, new_token_ids: Sequence[int]) -> None:
        outcomes: dict[str, list[tuple[int, bool]]] = {}
        for node, hit in draft.outcomes(new_token_ids):
            for member, guess in zip(draft.members[node], draft.guesses[node], strict=True):
                outcomes.setdefault(member, []).append((guess, hit))
        for member, of_member in outcomes.items():
            self._acceptance[member].learn(request_id, of_member)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        if not step.requests:
            return []
        begin_s = self.clock()
        self._begin_step()
        requests = step.requests
        market = self._market(step)
        drafts: dict[int, list[Draft]] = {}  # by index of the request
        rest = [1.0] * len(requests)
        self._asking.begin(requests, market, self._learns)
        draft_s, num_asked = 0.0, 0
        for drafter in self.drafters.values():
            asked = self._asking.whom(drafter, rest, market)
            if asked:
                num_asked += 1
                part, given = step, budgets
                if len(asked) < len(requests):
                    part, given = replace(step, requests=[requests[i] for i in asked]), [budgets[i] for i in asked]
                drafted, spent_s = self._ask(drafter, part, given, market)
                draft_s += spent_s
                for i, draft in zip(asked, drafted, strict=True):
                    if draft is not None:
                        drafts.setdefault(i, []).append(draft)
                        rest[i] *= 1.0 - draft.first_chance
        if drafts:
            offered = self._offer(requests, budgets, drafts, market)
        else:
            offered = [EMPTY_TREE] * len(requests)
            self._reasons["nothing_drafted" if num_asked else "skipped"] += 1
        self._num_to_skip = 0 if num_asked else self._steps_to_skip()
        self._handed_over_s = self.clock()
        self._drafting_s = self._handed_over_s - begin_s
        own_s = self._drafting_s - draft_s
        self._own_s += own_s
        if num_asked:
            self._beside_s += (own_s / num_asked - self._beside_s) / PASSAGE
        return offered

    def _begin_step(self) -> None:
        self._step += 1
        self._totals["steps"] += 1
        skipped = self._num_skipped
        if skipped:
            self._num_skipped = 0
            self._step += skipped
            self._totals["steps"] += skipped
            self._reasons["skipped"] += skipped
            self.bucket.earn(skipped * self._step_s, self._step_s)
            self.price.learn(1.0, 1.0, skipped)
        is_new = self._step * max(4, 1 if self._today is None else self._today.num_requests) < LASTING
        self._learns = skipped > 0 or is_new or self._step % LEARN_EVERY == 0
        if self._learns:
            self._save()

    def _market(self, step: StepContext) -> Market:
        running = sum([verified.request.status is RequestStatus.RUNNING for verified in step.passes])
        count = max(running, len(step.requests), 1)
        last = self._today
        if last is not None and not self._learns and last.num_requests == count:  # nothing was learned since
            self._today = Market(self._step, *last[1:])
            return self._today
        plain_s = self.cost.at(count, count)
        tokens_per_s = self.price.tokens_per_s(count, plain_s)
        rows = max(4, count)  # one row alone may be the first of a tile
        row_s = (self.cost.at(count + rows, count) - plain_s) / rows
        self._today = Market(self._step, count, self.cost.at(1, 1), plain_s, tokens_per_s, tokens_per_s * row_s)
        return self._today

    def _ask(
        self, drafter: Drafter, step: StepContext, budgets: Sequence[Budget], market: Market
    ) -> tuple[list[Draft | None], float]:
        """Its drafts for all requests of the step, rated; and the time that took."""
        requests, gains = step.requests, drafter.gain.requests
        level = market.tokens_per_s * drafter.cost.level_s(len(requests), market.unit_s)
        bar = min(0.9, market.row_price)  # a path goes on where what follows is worth a row, and a level of drafting
        further = min(0.9, (bar + level) / max(0.3, drafter.first_chance))
        given = []
        for request, (nodes, depth, *_) in zip(requests, budgets, strict=True):
            own = gains.get(request.request_id)
            if nodes > FEW_NODES and (own is None or own.value <= 2.0):  # a large tree is not worth rating
                nodes = FEW_NODES
            given.append(Budget(nodes, depth, bar, further))
        missed = market.step - drafter.gain.step - LEARN_EVERY
        if missed > 0:
            drafter.acceptance.estimate.age(missed, LASTING)
        trees, spent_s = self.members.ask(drafter.name, step, given)
        drafts: list[Draft | None] = []
        is_tried = drafter.verdict.decision == "tried"
        if is_tried and drafter.num_asked:  # of the first call nobody could know what it would take
            self.bucket.pay(max(0.0, spent_s - drafter.verdict.seconds))
        is_learned = self._learns or is_tried
        for request, tree in zip(requests, trees, strict=True):
            name, draft = request.request_id, None
            if tree.token_ids:
                draft = draft_of(drafter.name, tree, name, drafter.acceptance, drafter.proposer.keeps_whole)
                drafter.first_chance += (draft.first_chance - drafter.first_chance) / PASSAGE
            if is_learned or draft is not None:
                gain_at = _no_gain if draft is None else draft.gain
                gain = gain_at(market.row_price)
                drafter.gain.learn_of(name, gain, market.step)
                if is_learned:
                    drafter.gain.learn(gain_at, gain, market.row_price, market.step, drafter.acceptance.is_new)
            drafts.append(draft)
        if is_learned:
            deepest = max([draft.depth for draft in drafts if draft is not None], default=0)
            beside_s = drafter.told_s + self._beside_s  # rating and choosing are part of the price
            drafter.cost.learn(spent_s + beside_s, len(requests), deepest, market.unit_s)
        drafter.num_asked += 1
        self._totals["asked"] += len(requests)
        return drafts, spent_s

    def _offer(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drafts: dict[int, list[Draft]], market: Market
    ) -> list[DraftTree]:
        offered = [EMPTY_TREE] * len(requests)
        joined = [join(of_request, requests[i].request_id, self._acceptance) for i, of_request in drafts.items()]
        chances = [draft.chances for draft in joined]
        choice = choose(chances, market.num_requests, self.cost, market.tokens_per_s)
        reason = "pays"
        if not choice.num_nodes:
            choice, reason = self._check_rows(chances, choice, market)
        num_drafted = num_offered = 0
        for (i, of_request), draft, keep in zip(drafts.items(), joined, choice.keep, strict=True):
            self._drafts[requests[i].request_id] = draft
            whole = {one.members[0][0]: one.whole for one in of_request if one.whole is not None}
            if whole:
                if draft.gain(market.row_price) > 0.0 or any(one.draft_probs is not None for one in whole.values()):
                    offered[i] = side_by_side(whole, budgets[i])
            elif keep:
                offered[i] = draft.tree(keep[: budgets[i].num_nodes])
            num_drafted += len(draft.chances)
            num_offered += len(offered[i])
        self._totals["drafted_nodes"] += num_drafted
        self._totals["offered_nodes"] += num_offered
        self._reasons[reason] += 1
        self._last = choice, market
        return offered

    def _check_rows(self, chances: Sequence[Sequence[float]], choice: Choice, market: Market) -> tuple[Choice, str]:
        """Nothing pays. Where no draft was verified for long, rows may cost less than they seem to: then the bucket
        buys those that would pay at a lower price."""
        if market.step - self._drafted_in >= LASTING // 4:
            tried = choose(chances, market.num_requests, self.cost, market.tokens_per_s, UNSURE)
            loss_s = max(0.0, tried.seconds - tried.tokens / market.tokens_per_s)
            if tried.num_nodes and loss_s <= self.bucket.saved_s:
                self.bucket.pay(loss_s)
                return tried, "probe"
        return choice, "too_expensive"

    def _steps_to_skip(self) -> int:
        """Where nobody is asked or told anything: until the bucket holds what is to be tried next."""
        if self._step < LASTING // 4 or self._step_s <= 0.0:
            return 0
        if any(one.watches and self._step <= one.told_until for one in self.drafters.values()):
            return 0
        return int(min(MOST_SKIPPED, self._asking.lacks_s / (SHARE * self._step_s)))

    # -- what is kept, and what is said ------------------------------------------------------------------------------

    def _restore(self, known: dict[str, Any]) -> None:
        self.cost.restore(numbers(known.get("pass_cost"), self.cost.num_knots))
        drafters = known.get("drafters")
        for name, drafter in self.drafters.items():
            drafter.restore(drafters.get(name) if isinstance(drafters, dict) else None)

    def _save(self) -> None:
        if self._kept_in is not None and self.bucket.run_s >= self._save_at_s:
            self._save_at_s += min(60.0, self._save_at_s)
            used = {name: drafter.state() for name, drafter in self.drafters.items() if drafter.num_asked}
            if not save(self._kept_in, {"pass_cost": self.cost.state(), "drafters": used}):
                self._kept_in = None

    def report(self) -> dict[str, Any]:
        """What it knows and what it decided last, for statistics and the server's page."""
        seconds = self.members.seconds
        return {
            **self._totals,
            "own_s": self._own_s,
            "exploration_s": self.bucket.lost_s,
            "pass_cost_s": self.cost.table(),
            "members": {name: one.report() | {"seconds": seconds[name]} for name, one in self.drafters.items()},
            "reasons": dict(self._reasons),
            "last_decision": self._said(),
        }

    def _said(self) -> str:
        if self._last is None:
            return "nothing asked yet"
        choice, market = self._last
        batch = f"{market.num_requests} request{'s' if market.num_requests != 1 else ''}"
        if not choice.num_nodes:
            return f"off: no draft for {batch} is expected to save more than it costs"
        worth = market.tokens_per_s * choice.seconds
        more = f"{choice.tokens:.2f} more tokens for {choice.seconds / market.plain_s:.0%} more time"
        return f"{choice.num_nodes} nodes for {batch}: {more}, which is worth {worth:.2f} tokens"


def _no_gain(row_price: float) -> float:
    return 0.0
