"""Who is asked in the next few steps, and for which requests.

One rule: a thing is bought iff it is expected to bring more tokens than its seconds are worth, at the batch's present
tokens per second. Which nodes are worth their rows follows from the same rule (`Draft.offer`); whom it cannot be worth
asking now but may be, by the upper bound of what is known, is asked out of the bucket.
"""

from collections.abc import Mapping, Sequence

from paceline.core.request import Request
from paceline.spec.auto.constants import PASSAGE, PLAN_EVERY, TRIED, WORTHWHILE
from paceline.spec.auto.cost import Market
from paceline.spec.auto.drafter import Drafter
from paceline.spec.auto.explore import Bucket, Expectation


class Plan:
    def __init__(self, drafters: Mapping[str, Drafter], bucket: Bucket) -> None:
        self._drafters, self._bucket = list(drafters.values()), bucket
        self._able: list[Drafter] = []  # who can draft for any of the requests
        self._ids: list[str] = []  # of the requests
        self._until = 0  # step
        self.is_new = False  # made in this step
        self.active: list[Drafter] = []  # who is asked, the cheapest first
        self.next_loss_s: float | None = None  # of what is tried next, as soon as the bucket holds it; None: nothing

    def follow(self, requests: Sequence[Request], count: int, market: Market) -> None:
        """Made again every few steps, and when the requests change."""
        ids = [request.request_id for request in requests]
        self.is_new = False
        if ids != self._ids:
            self._ids = ids
            self._able = [one for one in self._drafters if one.find_able(requests)]
        elif market.step < self._until:
            return
        self.is_new = True
        self._until = market.step + PLAN_EVERY
        market.quote(count)
        self._bucket.start(market.unit_s)
        for drafter in self._able:
            drafter.plan(ids, market)
        self._try(market)
        for drafter in self._able:
            if drafter.watches:
                self._tell_or_not(drafter, market)
        active = [one for one in self._able if one.asked or one.tried or one.tried_until >= market.step]
        self.active = sorted(active, key=lambda one: one.each_s + one.call_s)

    def renew(self, lost_s: float) -> None:
        """Something took so much longer than the plan was made for. It empties the bucket at most: a stall must not end
        all trials for long."""
        self._bucket.pay(max(0.0, min(lost_s, self._bucket.saved_s)))
        self._until = 0

    def _try(self, market: Market) -> None:
        """Out of the bucket: those with the best upper bound per second lost, up to the first that it does not hold
        but saves for."""
        self.next_loss_s = None
        trials = []
        for drafter in self._able:
            is_tried = drafter.tried_until >= market.step and not drafter.asked
            drafter.tried = self._best(drafter) if is_tried else []
            trial = None if is_tried else self._trial(drafter, market)
            if trial is not None:
                trials.append((*trial, drafter))
        for _, loss_s, asked, drafter in sorted(trials, key=lambda one: -one[0]):
            ready_in = 0 if drafter.is_ready(market.step) else PASSAGE
            if loss_s + ready_in * drafter.told_s > self._bucket.saved_s:  # telling is paid for as it goes on
                self.next_loss_s = loss_s + ready_in * drafter.told_s
                return
            self._bucket.pay(loss_s)
            drafter.tried = asked
            if drafter.watches:
                drafter.keep_told(market.step, ready_in + TRIED)
                drafter.tried_until = market.step + ready_in + TRIED - 1
            if not drafter.asked:
                drafter.note("tried", asked, market.tokens_per_s)

    def _trial(self, drafter: Drafter, market: Market) -> tuple[float, float, list[Expectation]] | None:
        """Best case per second, seconds lost as expected, and for whom; None where it cannot pay even at best."""
        if drafter.asked and drafter.watches:
            return None
        rate = market.tokens_per_s
        least = 1.0 if drafter.cost.num_learned > 1 else 0.1  # before the second call its price may be next to nothing
        each = least * rate * drafter.each_s
        others = [one for one in self._best(drafter) if one.most > each]
        call_s = 0.0 if drafter.asked else drafter.call_s
        best = sum([one.most - each for one in others]) - least * rate * call_s
        if best <= WORTHWHILE * len(others):
            return None
        loss_s = call_s + drafter.each_s * len(others) - sum([one.mean for one in others]) / rate
        loss_s = max(1e-9, loss_s)
        loss_s = TRIED * loss_s if drafter.watches else loss_s
        return best / loss_s, loss_s, others

    @staticmethod
    def _best(drafter: Drafter) -> list[Expectation]:
        """For whom it is tried: one request as long as its price is not known, a few if it must be told of passes."""
        others = [one for one in drafter.expected if one not in drafter.asked]
        others.sort(key=lambda one: -one.most)
        return others[:1] if drafter.cost.num_learned < 2 else others[:TRIED] if drafter.watches else others

    def _tell_or_not(self, drafter: Drafter, market: Market) -> None:
        if drafter.asked:
            drafter.keep_told(market.step, 2 * PASSAGE)
        elif drafter.is_told:
            self._bucket.pay(PLAN_EVERY * drafter.told_s)
            if self._bucket.saved_s < 0.0:
                drafter.told_until = drafter.tried_until
        drafter.is_told = market.step <= drafter.told_until

    @property
    def is_idle(self) -> bool:
        """Nobody is asked, and nobody is told."""
        return not self.active and not any(one.watches and one.is_told for one in self._able)
