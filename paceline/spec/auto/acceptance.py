"""The chance that a drafted token is accepted if its parent is: one model per drafter, learned from every outcome.

    log odds = w . (1, log odds that the drafter gave, depth, rank) + the request's own

The drafter's own confidence is the start. Every guess on the path that the target took is an outcome, whether it was
verified or not, because the tokens that the target emitted show which child was right. Requests differ, so each has an
offset of its own, which begins at nothing and follows its last few outcomes.
"""

import math
from collections.abc import Sequence

from paceline.lab.estimate import Estimate
from paceline.spec.auto.constants import LASTING, PASSAGE
from paceline.spec.merge.guess import features_of


class Acceptance:
    def __init__(self) -> None:
        # Before anything was seen the drafter's own word, widely uncertain.
        self.estimate = Estimate((0.0, 1.0, 0.0, 0.0), (1.0, 0.3, 0.3, 0.5))
        self._requests: dict[str, Estimate] = {}
        self._factors: dict[str, float] = {}  # on the odds, of each request
        self.known: dict[int, float] = {}  # guess -> odds, as of the last refresh

    @property
    def is_new(self) -> bool:
        """Is every outcome still news?"""
        return self.estimate.num_learned < LASTING // 4

    def odds(self, guess: int) -> float:
        """For a request like any other, a standard deviation below the mean: what is not known yet is not bought."""
        odds = self.known.get(guess)
        if odds is None:
            features = features_of(guess)
            log_odds = self.estimate.at(features) - math.sqrt(self.estimate.variance(features))
            odds = self.known[guess] = math.exp(max(-30.0, min(30.0, log_odds)))
        return odds

    def factor(self, request_id: str) -> float:
        """On the odds, for this request."""
        return self._factors.get(request_id, 1.0)

    def learn(self, request_id: str, outcomes: Sequence[tuple[int, bool]]) -> None:
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = Estimate((0.0,), (1.0,))
        estimate = self.estimate
        for guess, hit in outcomes:
            features = features_of(guess)
            log_odds = max(-5.0, min(5.0, estimate.at(features) + own.weights[0]))
            chance = 1.0 / (1.0 + math.exp(-log_odds))
            information = chance * (1.0 - chance)
            error, noise = (hit - chance) / information, 1.0 / information
            estimate.learn(features, error, noise + own.variances[0], LASTING)
            own.learn((1.0,), error, noise, PASSAGE)
        self._factors[request_id] = math.exp(max(-5.0, min(5.0, own.weights[0])))
        num_learned = estimate.num_learned
        refresh = LASTING // 8 if num_learned < LASTING else LASTING  # later they change slowly
        if self.is_new or num_learned // refresh != (num_learned - len(outcomes)) // refresh:
            self.known.clear()

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._factors.pop(request_id, None)
