"""`auto`: drafts where drafting pays, as measured live, and nowhere else. docs/auto.md explains it.

One rule for everything: let the batch's present tokens per second be the price of a second; a node, a level, a drafter
or a trial is bought iff it is expected to bring more tokens than its seconds are worth.

    cost.py         what a pass and a drafter's call take, and the price of a second
    acceptance.py   the chance of a node
    choose.py       which nodes are worth their rows
    explore.py      what asking brings, and the bucket that pays for finding out

Leaving nodes out is exact: with sample-match verification the output does not depend on which nodes were offered.

    LLM(model, {"method": "auto"})                                the default
    LLM(model, {"method": "auto", "members": ["ngram", "suffix"], "node_budget": 16})   limits by hand
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.choose import Choice, Draft, choose, draft_of, join
from paceline.spec.auto.constants import (
    FEW_NODES,
    LASTING,
    LEARN_EVERY,
    MOST_SKIPPED,
    PASSAGE,
    SHARE,
    START_S,
    TRIED,
    UNSURE,
)
from paceline.spec.auto.cost import Price
from paceline.spec.auto.drafter import Drafter, Expectation, Market, Verdict
from paceline.spec.auto.explore import Bucket
from paceline.spec.auto.memory import load, memory_path, numbers, save
from paceline.spec.engine_parts import EngineParts
from paceline.spec.merge.merge import side_by_side
from paceline.spec.pass_calibration import calibrate
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext, union

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig


def no_gain(row_price: float) -> float:
    return 0.0


class AutoProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        members: "Sequence[SpeculativeConfig] | None" = None,  # None: all that this target has
        remember: bool = True,
    ) -> None:
        from paceline.spec.auto.default_members import build_members  # reads the table, which has a row for this file

        self.members = build_members(services, largest, members)
        self.drafters = {name: Drafter(name, proposer) for name, proposer in self.members.proposers.items()}
        self.clock: Callable[[], float] = time.perf_counter
        self.cost = PassCostModel(calibrate(services), services.pass_sizes)
        self.bucket = Bucket()
        self.price = Price()
        self._acceptance = {name: drafter.acceptance for name, drafter in self.drafters.items()}
        self._step = 0
        self._drafts: dict[str, Draft] = {}  # request id -> what was drafted for it last
        self._handed_over_s: float | None = None  # when the last step's drafts were handed over
        self._step_s = self._drafting_s = 0.0  # of the last pass, and of all that was done after it
        self._num_requests = 0  # in the last pass
        self._learns = True
        self._drafted_in = 0  # the last step whose pass verified a node
        self._num_to_skip = self._num_skipped = 0
        self._own_s = 0.0
        self._totals = {"steps": 0, "asked": 0, "drafted_nodes": 0, "offered_nodes": 0}
        self._reasons: Counter[str] = Counter()  # reason -> steps
        self._last: tuple[Choice, Market] | None = None
        self._waits_s = 0.0  # that the bucket lacks for what would be tried next
        self._memory = memory_path(services) if remember else None
        self._save_at_s = START_S
        self._restore(load(self._memory))

    def _restore(self, known: dict[str, Any]) -> None:
        self.cost.restore(numbers(known.get("pass_cost"), self.cost.num_knots))
        drafters = known.get("drafters")
        for name, drafter in self.drafters.items():
            drafter.restore(drafters.get(name) if isinstance(drafters, dict) else None)

    def _save(self) -> None:
        if self._memory is not None and self.bucket.run_s >= self._save_at_s:
            self._save_at_s = self.bucket.run_s + min(60.0, self._save_at_s)
            used = {name: drafter.state() for name, drafter in self.drafters.items() if drafter.num_asked}
            if not save(self._memory, {"pass_cost": self.cost.state(), "drafters": used}):
                self._memory = None

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # read only: it follows who is told of passes
        told = [one.proposer.needs for one in self.drafters.values() if not one.watches or one.is_told(self._step)]
        return union(told)

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
        self._learn_cost(step, begin_s)
        if self._drafts:
            for verified in step.passes:
                draft = self._drafts.pop(verified.request.request_id, None)
                if draft is not None and self._learns:
                    self._learn_outcomes(verified.request.request_id, draft, verified.new_token_ids)
        for request in step.gone:
            self._drafts.pop(request.request_id, None)
            for drafter in self.drafters.values():
                drafter.forget(request.request_id)
        self._own_s += self.clock() - begin_s
        for name, drafter in self.drafters.items():
            if drafter.is_told(self._step) if drafter.watches else drafter.verdict.num_requests:
                drafter.told_s = self.members.tell(name, step)
            else:
                drafter.told_s = self.members.forget(name, step.gone)

    def _learn_cost(self, step: StepContext, now_s: float) -> None:
        if self._handed_over_s is None:
            return
        elapsed_s = now_s - self._handed_over_s
        self._handed_over_s = None
        if self._num_skipped:
            return  # it began several steps ago
        self.bucket.earn(elapsed_s + self._drafting_s, elapsed_s)
        num_decodes = num_rows = num_tokens = 0
        for verified in step.passes:
            if verified.num_committed > 1:
                return  # prompt rows have a cost of their own
            num_rows += len(verified.rows)
            if verified.logits_row >= 0:
                num_decodes += 1
                num_tokens += len(verified.new_token_ids)
        if not num_decodes or elapsed_s <= 0.0:
            return
        self._step_s = elapsed_s
        if self._learns or num_rows > num_decodes:
            self.cost.observe(num_rows, elapsed_s, num_decodes)
        if num_rows > num_decodes:
            self._drafted_in = self._step
        plain_s = self.cost.at(num_decodes, num_decodes)
        seconds = self.cost.at(num_rows, num_decodes) + self._drafting_s
        self.price.learn(num_tokens / num_decodes, seconds / plain_s)

    def _learn_outcomes(self, request_id: str, draft: Draft, new_token_ids: Sequence[int]) -> None:
        outcomes: dict[str, list[tuple[int, bool]]] = {}
        for node, hit in draft.outcomes(new_token_ids):
            for member, guess in zip(draft.members[node], draft.guesses[node], strict=True):
                outcomes.setdefault(member, []).append((guess, hit))
        for member, of_member in outcomes.items():
            self._acceptance[member].learn(request_id, of_member)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        begin_s = self.clock()
        self._begin_step()
        market = self._market(step)
        requests = step.requests
        drafts: list[list[Draft]] = [[] for _ in requests]
        rest = [1.0] * len(requests)  # by request: the chance that no drafter asked before has its next token
        plans = {name: one.expectations(requests, market) for name, one in self.drafters.items()}
        tried = self._what_to_try(plans, market) if self._learns else []
        draft_s = 0.0
        for drafter in self.drafters.values():
            asked = self._whom_to_ask(drafter, plans[drafter.name], rest, market, drafter in tried)
            if asked:
                draft_s += self._ask(drafter, step, budgets, asked, drafts, rest, market)
        offered = self._offer(requests, budgets, drafts, market)
        self._plan_skips(market)
        self._handed_over_s = self.clock()
        self._drafting_s = self._handed_over_s - begin_s
        self._own_s += self._drafting_s - draft_s
        return offered

    def _begin_step(self) -> None:
        skipped, self._num_skipped = self._num_skipped, 0
        self._step += 1 + skipped
        self._totals["steps"] += 1 + skipped
        self._reasons["skipped"] += skipped
        self.bucket.earn(skipped * self._step_s, self._step_s)
        self.price.learn(1.0, 1.0, skipped)
        self._learns = self._step < LASTING // 4 or self._step % LEARN_EVERY == 0
        self._save()

    def _market(self, step: StepContext) -> Market:
        running = sum([verified.request.status is RequestStatus.RUNNING for verified in step.passes])
        count = max(running, len(step.requests), 1)
        plain_s = self.cost.at(count, count)
        tokens_per_s = self.price.tokens_per_s(count, plain_s)
        rows = max(4, count)
        row_s = (self.cost.at(count + rows, count) - plain_s) / rows
        return Market(self._step, count, self.cost.at(1, 1), plain_s, tokens_per_s, tokens_per_s * row_s)

    def _what_to_try(self, plans: dict[str, list[Expectation]], market: Market) -> list[Drafter]:
        """Drafters whose gain may be worth their time at best, the best per second lost first: as many as the bucket pays
        for, up to the first that it does not pay for yet, and is saved for."""
        options: list[tuple[float, float, int, str]] = []
        for name, plan in plans.items():
            drafter = self.drafters[name]
            if drafter.paid_until >= market.step:
                continue
            # The first time of all it is asked once, for one request: its price is not known.
            most, steps = (TRIED, TRIED) if drafter.watches and drafter.num_asked else (1, 1)
            call_s, each_s = drafter.cost.parts(market.unit_s)
            price = market.tokens_per_s * each_s
            others = [one for one in plan if one.mean <= price]
            if sum([one.mean - price for one in plan if one.mean > price]) <= market.tokens_per_s * call_s:
                others = plan  # otherwise those above the price are asked for anyway
            if not others:
                continue
            ranked = sorted(others, key=lambda one: -one.mean - one.deviation)[:most]
            seconds = call_s + each_s * len(ranked)
            upper = sum([one.mean + one.deviation for one in ranked])
            surplus = upper - market.tokens_per_s * drafter.cost.least_s(len(ranked), market.unit_s)
            loss_s = max(1e-9, seconds - sum([one.mean for one in ranked]) / market.tokens_per_s)
            if surplus > 0.0:
                options.append((surplus / loss_s, loss_s * steps, steps, name))
            else:
                drafter.rule_out(market.step)
        tried: list[Drafter] = []
        saved_s, self._waits_s = self.bucket.saved_s, math.inf
        for _, loss_s, steps, name in sorted(options, reverse=True):
            saved_s -= loss_s
            if saved_s < 0.0:
                self._waits_s = -saved_s
                break
            drafter = self.drafters[name]
            tried.append(drafter)
            if drafter.watches:
                steps += 0 if drafter.is_ready(market.step) else PASSAGE
                drafter.paid_until = market.step + steps - 1
                drafter.keep_told(market.step, steps + PASSAGE)
        return tried

    def _whom_to_ask(
        self, drafter: Drafter, plan: list[Expectation], rest: list[float], market: Market, is_tried: bool
    ) -> list[int]:
        """Requests for which it is asked: where the gain is worth the time or, in a trial, may be."""
        call_s, each_s = drafter.cost.parts(market.unit_s)
        price, call = market.tokens_per_s * each_s, market.tokens_per_s * call_s
        if drafter.watches and sum([one.mean - price for one in plan if one.mean > price]) > call:
            drafter.keep_told(market.step, PASSAGE)
        asked = [one for one in plan if one.mean * rest[one.request] > price]
        if sum([one.mean * rest[one.request] - price for one in asked]) <= call:
            asked = []
        decision = "asked" if asked else "not asked"
        if is_tried or drafter.paid_until >= market.step:
            added = self._tried(drafter, [one for one in plan if one not in asked], rest, market, bool(asked))
            if added and not asked:
                decision = "tried"
            asked = asked + added
        if not drafter.is_ready(market.step):
            asked = []
        judged = asked or plan
        drafter.verdict = Verdict(
            decision,
            len(asked),
            sum([one.mean * rest[one.request] for one in judged]),
            sum([one.mean + one.deviation for one in judged]),
            price * len(judged) + call,
            each_s * len(judged) + call_s,
            market.tokens_per_s,
        )
        return sorted([one.request for one in asked])

    def _tried(
        self, drafter: Drafter, others: list[Expectation], rest: list[float], market: Market, is_asked: bool
    ) -> list[Expectation]:
        """Whom it is asked for out of the bucket, the best upper bound first."""
        call_s, each_s = drafter.cost.parts(market.unit_s)
        price = market.tokens_per_s * each_s if drafter.num_asked else 0.0  # not known yet
        if drafter.watches:
            others = others[: 0 if is_asked else TRIED if drafter.num_asked else 1]
        added: list[Expectation] = []
        for one in sorted(others, key=lambda one: -one.mean - one.deviation):
            loss_s = each_s - one.mean * rest[one.request] / market.tokens_per_s
            loss_s = max(0.0, loss_s + (0.0 if added or is_asked else call_s))
            is_worth_it = (one.mean + one.deviation) * rest[one.request] > price and loss_s <= self.bucket.saved_s
            if not (is_worth_it or drafter.watches):  # the trial of one that watches is paid for as a whole
                break
            self.bucket.pay(loss_s)
            added.append(one)
        return added

    def _ask(
        self,
        drafter: Drafter,
        step: StepContext,
        budgets: Sequence[Budget],
        asked: list[int],
        drafts: list[list[Draft]],
        rest: list[float],
        market: Market,
    ) -> float:
        """Its trees join those of the others; the time that took."""
        requests = step.requests
        part = step if len(asked) == len(requests) else replace(step, requests=[requests[i] for i in asked])
        level = market.tokens_per_s * drafter.cost.level_s(len(asked), market.unit_s)
        bar = min(0.9, market.row_price)
        floors = (bar, min(0.9, (bar + level) / max(0.3, drafter.first_chance)))
        given = [self._budget(drafter, requests[i].request_id, budgets[i], floors) for i in asked]
        drafted, spent_s = self.members.ask(drafter.name, part, given)
        deepest = 0
        for i, tree in zip(asked, drafted, strict=True):
            request_id = requests[i].request_id
            gain_at: Callable[[float], float] = no_gain
            if tree.token_ids:
                draft = draft_of(drafter.name, tree, request_id, drafter.acceptance, drafter.proposer.keeps_whole)
                drafts[i].append(draft)
                gain_at = draft.gain
                first = max([chance for chance, parent in zip(draft.chances, tree.parents, strict=True) if parent < 0])
                drafter.first_chance += 1.0 / PASSAGE * (first - drafter.first_chance)
                rest[i] *= 1.0 - first
                deepest = max(deepest, draft.depth)
            drafter.gain.learn_of(request_id, gain_at(market.row_price), market.step)
            if self._learns or drafter.verdict.decision == "tried":
                drafter.gain.learn(gain_at, market.row_price, market.step)
        drafter.cost.learn(spent_s + drafter.told_s, len(asked), deepest, market.unit_s)
        drafter.num_asked += 1
        self._totals["asked"] += len(asked)
        return spent_s

    def _budget(self, drafter: Drafter, request_id: str, budget: Budget, floors: tuple[float, float]) -> Budget:
        """A large tree takes time to draft and to rate: it is asked for where the last ones brought several tokens."""
        own = drafter.gain.requests.get(request_id)
        nodes = budget.num_nodes if own is not None and own.value > 2.0 else min(FEW_NODES, budget.num_nodes)
        return Budget(nodes, budget.max_depth, *floors)

    def _offer(
        self, requests: Sequence[Request], budgets: Sequence[Budget], drafts: list[list[Draft]], market: Market
    ) -> list[DraftTree]:
        offered = [EMPTY_TREE] * len(requests)
        drafted = [i for i, of_request in enumerate(drafts) if of_request]
        if not drafted:
            is_asked = any(one.verdict.num_requests for one in self.drafters.values())
            self._reasons["nothing_drafted" if is_asked else "skipped"] += 1
            return offered
        joined = [join(drafts[i], requests[i].request_id, self._acceptance) for i in drafted]
        choice = choose([draft.chances for draft in joined], market.num_requests, self.cost, market.tokens_per_s)
        reason = "pays"
        if not choice.num_nodes:
            choice, reason = self._check_rows(joined, choice, market)
        for i, draft, keep in zip(drafted, joined, choice.keep, strict=True):
            self._drafts[requests[i].request_id] = draft
            self._totals["drafted_nodes"] += len(draft.chances)
            whole = {one.members[0][0]: one.whole for one in drafts[i] if one.whole is not None}
            if whole:
                if draft.gain(market.row_price) > 0.0 or any(one.draft_probs is not None for one in whole.values()):
                    offered[i] = side_by_side(whole, budgets[i])
            elif keep:
                offered[i] = draft.tree(keep[: budgets[i].num_nodes])
            self._totals["offered_nodes"] += len(offered[i])
        self._reasons[reason] += 1
        self._last = choice, market
        return offered

    def _check_rows(self, drafts: Sequence[Draft], choice: Choice, market: Market) -> tuple[Choice, str]:
        """Nothing pays. Where no draft was verified for long, rows may cost less than they seem to: then the bucket
        buys those that would pay at a lower price."""
        if market.step - self._drafted_in >= LASTING // 4:
            chances = [draft.chances for draft in drafts]
            tried = choose(chances, market.num_requests, self.cost, market.tokens_per_s, UNSURE)
            loss_s = tried.seconds - tried.tokens / market.tokens_per_s
            if tried.num_nodes and loss_s <= self.bucket.saved_s:
                self.bucket.pay(max(0.0, loss_s))
                return tried, "probe"
        return choice, "too_expensive"

    def _plan_skips(self, market: Market) -> None:
        """Where nobody is asked or told anything, and the bucket must fill before something can be tried."""
        self._num_to_skip = 0
        is_idle = not any(
            one.verdict.num_requests or (one.watches and one.is_told(market.step)) for one in self.drafters.values()
        )
        if is_idle and self._step >= LASTING // 4 and self._step_s > 0.0:
            steps = self._waits_s / (SHARE * self._step_s)
            self._num_to_skip = int(min(MOST_SKIPPED, steps))

    def report(self) -> dict[str, Any]:
        """What it knows and what it decided last, for statistics and the server's page."""
        figures = {name: drafter.report() for name, drafter in self.drafters.items()}
        for name, spent_s in self.members.seconds.items():
            figures[name]["seconds"] = spent_s
        return {
            **self._totals,
            "own_s": self._own_s,
            "exploration_s": self.bucket.lost_s,
            "pass_cost_s": self.cost.table(),
            "members": figures,
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
        price = market.tokens_per_s * choice.seconds
        return (
            f"{choice.num_nodes} nodes for {batch}: {choice.tokens:.2f} more tokens for "
            f"{choice.seconds / market.plain_s:.0%} more time, which is worth {price:.2f}"
        )
