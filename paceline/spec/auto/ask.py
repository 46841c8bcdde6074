"""Who is asked, and for which requests: where the expected gain is worth the time or, out of the bucket, may be."""

import math
from collections.abc import Mapping, Sequence

from paceline.core.request import Request
from paceline.spec.auto.constants import PASSAGE, TRIED
from paceline.spec.auto.cost import Market
from paceline.spec.auto.drafter import FOR_NOW, Drafter, Expectation, Verdict
from paceline.spec.auto.explore import Bucket


class Asking:
    def __init__(self, drafters: Mapping[str, Drafter], bucket: Bucket) -> None:
        self._drafters, self._bucket = drafters, bucket
        self._names: list[str] = []  # of the requests that the plans are for
        self._plans: dict[str, list[Expectation]] = {}
        self._tried: list[str] = []
        self.lacks_s = 0.0  # that the bucket lacks for what would be tried next

    def begin(self, requests: Sequence[Request], market: Market, is_learned_from: bool) -> None:
        """In steps that are not learned from, what was expected of the same requests a moment ago still holds."""
        names = [request.request_id for request in requests]
        self._tried = []
        if is_learned_from or names != self._names:
            self._names = names
            self._plans = {name: one.expectations(requests, market) for name, one in self._drafters.items()}
            if is_learned_from and self._bucket.saved_s > 0.0:
                self._tried = self._what_to_try(market)

    def _what_to_try(self, market: Market) -> list[str]:
        """Drafters whose gain may be worth their time at best, the best per second lost first: as many as the bucket
        pays for, up to the first that it does not pay for yet, and is saved for."""
        options: list[tuple[float, float, int, str]] = []
        for name, plan in self._plans.items():
            drafter = self._drafters[name]
            # At first it is asked once, for one request: its price is not known.
            most, steps = (TRIED, TRIED) if drafter.watches and drafter.num_asked >= TRIED else (1, 1)
            call_s, each_s = drafter.cost.parts(market.unit_s)
            _, others = _worth_asking(plan, None, call_s, each_s, market.tokens_per_s)
            if drafter.paid_until >= market.step or not others:
                continue
            ranked = sorted(others, key=lambda one: -one.most)[:most]
            surplus = sum([one.most for one in ranked])
            surplus -= market.tokens_per_s * drafter.cost.least_s(len(ranked), market.unit_s)
            gained_s = sum([one.mean for one in ranked]) / market.tokens_per_s
            loss_s = max(1e-9, call_s + each_s * len(ranked) - gained_s)
            if surplus > 0.0:
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
        plan, rate = self._plans[drafter.name], market.tokens_per_s
        if not plan:
            return []
        call_s, each_s = drafter.cost.parts(market.unit_s)
        wanted = bool(_worth_asking(plan, None, call_s, each_s, rate)[0])
        if drafter.watches and wanted:
            drafter.keep_told(market.step, PASSAGE)
        asked, others = _worth_asking(plan, rest, call_s, each_s, rate)
        decision = "asked" if asked else "not asked"
        is_ready = drafter.is_ready(market.step)
        if is_ready and (drafter.name in self._tried or drafter.paid_until >= market.step):
            added = self._try(drafter, others, rest, market, bool(asked))
            decision = "tried" if added and not asked else decision
            asked = asked + added
        if not is_ready:
            asked = []
        if drafter.watches and not wanted:
            self._bucket.pay(drafter.told_s)
        judged = asked or plan
        gain, most = sum([one.mean * rest[one.request] for one in judged]), sum([one.most for one in judged])
        drafter.verdict = Verdict(decision, len(asked), gain, most, call_s + each_s * len(judged), rate)
        return sorted([one.request for one in asked])

    def _try(
        self, drafter: Drafter, others: list[Expectation], rest: Sequence[float], market: Market, is_asked: bool
    ) -> list[Expectation]:
        """Whom it is asked for out of the bucket, the best upper bound first."""
        call_s, each_s = drafter.cost.parts(market.unit_s)
        price = market.tokens_per_s * each_s if drafter.num_asked >= TRIED else 0.0  # not known before
        if drafter.watches:
            others = others[: 0 if is_asked else TRIED if drafter.num_asked >= TRIED else 1]
        added: list[Expectation] = []
        for one in sorted(others, key=lambda one: -one.most):
            loss_s = each_s - one.mean * rest[one.request] / market.tokens_per_s
            loss_s = max(0.0, loss_s + (0.0 if added or is_asked else call_s))
            is_worth_it = one.most * rest[one.request] > price and loss_s <= self._bucket.saved_s
            if not (is_worth_it or drafter.watches):  # the trial of one that watches is paid for as a whole
                break
            self._bucket.pay(loss_s)
            added.append(one)
        return added


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
