"""Who is asked, and for which requests: where the expected gain is worth the time or, out of the bucket, may be."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.core.request import Request
from paceline.spec.auto.constants import PASSAGE, TRIED
from paceline.spec.auto.cost import Market
from paceline.spec.auto.drafter import FOR_NOW, Drafter, Expectation, Verdict
from paceline.spec.auto.explore import Bucket


class Plan(NamedTuple):
    """For one drafter, in this step and the next few."""

    expected: list[Expectation]
    call_s: float
    each_s: float
    asked: list[Expectation]  # worth asking for, where no other drafter has found anything
    others: list[Expectation]
    verdict: Verdict  # where it is not asked


class Asking:
    def __init__(self, drafters: Mapping[str, Drafter], bucket: Bucket) -> None:
        self._drafters, self._bucket = drafters, bucket
        self._names: list[str] = []  # of the requests that the plans are for
        self._plans: dict[str, Plan] = {}
        self._tried: list[str] = []
        self.lacks_s = 0.0  # that the bucket lacks for what would be tried next

    def begin(self, requests: Sequence[Request], market: Market, is_learned_from: bool) -> None:
        """In steps that are not learned from, what was expected of the same requests a moment ago still holds."""
        names = [request.request_id for request in requests]
        self._tried = []
        if is_learned_from or names != self._names:
            self._names = names
            self._plans = {name: _plan(one, requests, market) for name, one in self._drafters.items()}
            if self._bucket.saved_s <= 0.0:
                self.lacks_s = -self._bucket.saved_s  # at least
            elif is_learned_from:
                self._tried = self._what_to_try(market)

    def _what_to_try(self, market: Market) -> list[str]:
        """Drafters whose gain may be worth their time at best, the best per second lost first: as many as the bucket
        pays for, up to the first that it does not pay for yet, and is saved for."""
        options: list[tuple[float, float, int, str]] = []
        for name, plan in self._plans.items():
            drafter = self._drafters[name]
            if not plan.others or drafter.paid_until >= market.step:
                continue
            # At first it is asked once, for one request: its price is not known.
            most, steps = (TRIED, TRIED) if drafter.watches and drafter.num_asked >= TRIED else (1, 1)
            ranked = plan.others if len(plan.others) == 1 else sorted(plan.others, key=_upper_bound)[:most]
            surplus = sum([one.most for one in ranked])
            surplus -= market.tokens_per_s * drafter.cost.least_s(len(ranked), market.unit_s)
            if surplus > 0.0:
                gained_s = sum([one.mean for one in ranked]) / market.tokens_per_s
                loss_s = max(1e-9, plan.call_s + plan.each_s * len(ranked) - gained_s)
                options.append((surplus / loss_s, loss_s * steps, steps, name))
            elif drafter.told_until == FOR_NOW:
                drafter.told_until = market.step  # a trial could not pay at these prices
        tried = []
        saved_s, self.lacks_s = self._bucket.saved_s, math.inf
        for _, loss_s, steps, name in sorted(options, reverse=True):
            saved_s -= loss_s
            if saved_s < 0.0:
                self.lacks_s = -saved_s
                break
            tried.append(name)
            drafter = self._drafters[name]
            if drafter.watches:
                steps += 0 if drafter.is_ready(market.step) else PASSAGE
                drafter.paid_until = market.step + steps - 1
                drafter.keep_told(market.step, steps + PASSAGE)
        return tried

    def whom(self, drafter: Drafter, rest: Sequence[float], market: Market) -> list[int]:
        """Requests that it is asked for. `rest`: the chance that no drafter asked before has their next token."""
        plan, step = self._plans[drafter.name], market.step
        if drafter.watches:
            if plan.asked:
                drafter.keep_told(step, PASSAGE)
            elif drafter.told_s:
                self._bucket.pay(min(drafter.told_s, max(0.0, self._bucket.saved_s)))
                if self._bucket.saved_s <= 0.0 and drafter.paid_until < step:
                    drafter.told_until = min(drafter.told_until, step)  # else nothing would be left for trying others
        asked, others = plan.asked, plan.others
        is_tried = drafter.paid_until >= step or drafter.name in self._tried
        if not (asked or is_tried) or not drafter.is_ready(step):
            drafter.verdict = plan.verdict
            return []
        if asked and min(rest) < 1.0:
            asked, others = _worth_asking(plan.expected, rest, plan.call_s, plan.each_s, market.tokens_per_s)
        decision = "asked"
        if is_tried:
            added = self._try(drafter, plan, others, rest, market, bool(asked))
            decision = "asked" if asked else "tried"
            asked = asked + added
        if not asked:
            drafter.verdict = plan.verdict
            return []
        gain, most = sum([one.mean * rest[one.request] for one in asked]), sum([one.most for one in asked])
        seconds = plan.call_s + plan.each_s * len(asked)
        drafter.verdict = Verdict(decision, len(asked), gain, most, seconds, market.tokens_per_s)
        return sorted([one.request for one in asked])

    def _try(
        self,
        drafter: Drafter,
        plan: Plan,
        others: list[Expectation],
        rest: Sequence[float],
        market: Market,
        is_asked: bool,
    ) -> list[Expectation]:
        """Whom it is asked for out of the bucket, the best upper bound first."""
        price = market.tokens_per_s * plan.each_s if drafter.num_asked >= TRIED else 0.0  # not known before
        if drafter.watches:
            others = others[: 0 if is_asked else TRIED if drafter.num_asked >= TRIED else 1]
        added: list[Expectation] = []
        for one in sorted(others, key=_upper_bound):
            loss_s = plan.each_s - one.mean * rest[one.request] / market.tokens_per_s
            loss_s = max(0.0, loss_s + (0.0 if added or is_asked else plan.call_s))
            is_worth_it = one.most * rest[one.request] > price and loss_s <= self._bucket.saved_s
            if not (is_worth_it or drafter.watches):  # the trial of one that watches is paid for as a whole
                break
            self._bucket.pay(loss_s)
            added.append(one)
        return added


def _upper_bound(one: Expectation) -> float:
    """For sorting, the largest first."""
    return -one.most


def _plan(drafter: Drafter, requests: Sequence[Request], market: Market) -> Plan:
    expected = drafter.expectations(requests, market)
    call_s, each_s = drafter.cost.parts(market.unit_s)
    asked, others = _worth_asking(expected, None, call_s, each_s, market.tokens_per_s)
    gain, most = sum([one.mean for one in expected]), sum([one.most for one in expected])
    verdict = Verdict("not asked", 0, gain, most, call_s + each_s * len(expected), market.tokens_per_s)
    return Plan(expected, call_s, each_s, asked, others, verdict)


def _worth_asking(
    plan: list[Expectation], rest: Sequence[float] | None, call_s: float, each_s: float, tokens_per_s: float
) -> tuple[list[Expectation], list[Expectation]]:
    """The rule: those whose gains are worth their seconds, and together the call's as well; and all others."""
    price = tokens_per_s * each_s
    worth = [one.mean * (1.0 if rest is None else rest[one.request]) - price for one in plan]
    if sum([one for one in worth if one > 0.0]) <= tokens_per_s * call_s:
        return [], plan
    return (
        [one for one, surplus in zip(plan, worth, strict=True) if surplus > 0.0],
        [one for one, surplus in zip(plan, worth, strict=True) if surplus <= 0.0],
    )
