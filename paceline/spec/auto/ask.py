"""Who is asked, and for which requests: where the expected gain is worth the time or, out of the bucket, may be."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.core.request import Request
from paceline.spec.auto.constants import PASSAGE, TRIED
from paceline.spec.auto.cost import Market
from paceline.spec.auto.drafter import Drafter, Verdict
from paceline.spec.auto.explore import Bucket, Expectation


class Trial(NamedTuple):
    """What may be asked out of the bucket."""

    drafter: Drafter
    asked: list[Expectation]
    num_steps: int
    surplus: float  # tokens beyond its price, at best
    loss_s: float  # expected


class Asking:
    def __init__(self, drafters: Mapping[str, Drafter], bucket: Bucket) -> None:
        self._drafters, self._bucket = list(drafters.values()), bucket
        self._names: list[str] = []  # of the requests that the plans are for
        self._able: list[Drafter] = []  # who can draft for any of them
        self._active: list[Drafter] = []  # and may be asked now
        self._pays = False  # asking whoever is worth it, by the plans
        self._trials: dict[str, Trial] = {}  # of this step
        self.next_loss_s: float | None = 0.0  # of what is tried next, as soon as the bucket holds it; None: nothing

    def begin(self, requests: Sequence[Request], market: Market, is_learned_from: bool) -> list[Drafter]:
        """Those who may be asked now. In steps that are not learned from, what was expected of the same requests a
        moment ago still holds."""
        names = [request.request_id for request in requests]
        self._trials = {}
        is_same = names == self._names
        if not is_same:
            self._names = names
            self._able = [one for one in self._drafters if one.find_able(requests)]
        if is_learned_from or not is_same:
            for drafter in self._able:
                drafter.plan(requests, market)
            # Together they must be worth what the step takes longer because of any of them.
            self._pays = sum([one.surplus for one in self._able]) > market.tokens_per_s * market.awake_s
            if is_learned_from:
                self._choose_trials(market)
            self._active = [d for d in self._able if d.watches or (self._pays and d.worth) or d.name in self._trials]
        return self._active

    def _choose_trials(self, market: Market) -> None:
        """Those with the best surplus per second lost, up to the first that the bucket does not hold but saves for."""
        self.next_loss_s = None
        possible = [self._trial_of(drafter, market) for drafter in self._able]
        for trial in sorted([one for one in possible if one is not None], key=lambda one: -one.surplus / one.loss_s):
            if trial.loss_s > self._bucket.saved_s:
                self.next_loss_s = trial.loss_s
                return
            self._bucket.pay(trial.loss_s)
            self._trials[trial.drafter.name] = trial
            if trial.drafter.watches:
                trial.drafter.tried_until = market.step + trial.num_steps - 1
                trial.drafter.keep_told(market.step, trial.num_steps + PASSAGE)

    def _trial_of(self, drafter: Drafter, market: Market) -> Trial | None:
        """None where its gain cannot be worth its time even at best."""
        is_asked, rate = self._pays and bool(drafter.worth), market.tokens_per_s
        if drafter.tried_until >= market.step or (is_asked and drafter.watches):
            return None
        others = [one for one in drafter.expected if not (is_asked and one in drafter.worth)]
        others.sort(key=lambda one: -one.most)
        is_known = drafter.num_asked >= TRIED  # before, it is asked for one request: its price is not known
        num_steps = TRIED if is_known and drafter.watches else 1
        if is_known and not drafter.watches:
            others = [one for one in others if one.most > rate * drafter.each_s]
        else:
            others = others[:num_steps]
        surplus = sum([one.most for one in others]) - rate * drafter.cost.least_s(len(others), market.unit_s)
        if surplus <= 0.0:
            if math.isinf(drafter.told_until) and others:
                drafter.told_until = market.step  # a trial could not pay at these prices
            return None
        loss_s = drafter.each_s * len(others) - sum([one.mean for one in others]) / rate
        loss_s += (0.0 if is_asked else drafter.call_s) + (0.0 if self._pays else market.awake_s)
        loss_s = num_steps * max(1e-9, loss_s)
        if not drafter.is_ready(market.step):
            num_steps += PASSAGE
            loss_s += PASSAGE * market.wait_s
        if drafter.watches:
            loss_s += (num_steps + PASSAGE) * drafter.told_s
        return Trial(drafter, others, num_steps, surplus, loss_s)

    def whom(self, drafter: Drafter, rest: Sequence[float], market: Market) -> list[int]:
        """Requests that it is asked for. `rest`: the chance that no drafter asked before has their next token."""
        asked = drafter.worth if self._pays else []
        if drafter.watches:
            self._tell_or_not(drafter, bool(asked), market)
        trial = self._trials.get(drafter.name)
        is_tried = trial is not None or drafter.tried_until >= market.step
        if not (asked or is_tried) or not drafter.is_ready(market.step):
            return []
        if asked and min(rest) < 1.0:
            asked, _ = drafter.worth_asking(rest, market)
        decision = "asked" if asked else "tried"
        if trial is not None:
            asked = asked + [one for one in trial.asked if one not in asked]
        elif is_tried and not asked:
            asked = sorted(drafter.expected, key=lambda one: -one.most)[: TRIED if drafter.num_asked >= TRIED else 1]
        if not asked:
            return []
        drafter.is_asked = True
        if drafter.verdict.decision != decision or trial is not None:
            gain, most = sum([one.mean * rest[one.request] for one in asked]), sum([one.most for one in asked])
            seconds = drafter.call_s + drafter.each_s * len(asked)
            drafter.verdict = Verdict(decision, gain, most, seconds, market.tokens_per_s)
        return sorted([one.request for one in asked])

    def _tell_or_not(self, drafter: Drafter, is_asked: bool, market: Market) -> None:
        """One that is not asked is told of passes out of the bucket, as long as others can be tried from it too."""
        if is_asked:
            drafter.keep_told(market.step, PASSAGE)
        elif drafter.is_told and math.isinf(drafter.told_until):  # later ones are part of a trial's price
            self._bucket.pay(min(drafter.told_s, max(0.0, self._bucket.saved_s)))
            if self._bucket.saved_s <= 0.0 and drafter.tried_until < market.step:
                drafter.told_until = market.step - 1
        drafter.is_told = market.step <= drafter.told_until
