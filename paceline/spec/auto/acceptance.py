"""The chance that a drafted token is accepted if its parent is: one model per drafter, learned from every outcome.

    log odds = w . (1, log odds that the drafter gave, depth, rank, others agree, others disagree) + the request's own

The drafter's own confidence is the start, at somewhat lower odds. Every guess on the path that the target took is an
outcome, whether it was verified or not, because the tokens that the target emitted show which child was right.
Requests differ, so each has an offset of its own, which begins at nothing and follows its last few outcomes.

All that is known of a node beforehand is one number, its *guess*, so that a chance is looked up and not computed.
"""

import math
from collections.abc import Sequence

from paceline.core.tree import DraftTree
from paceline.spec.auto.constants import LASTING, OVERCLAIM, PASSAGE
from paceline.spec.auto.estimate import Estimate

BUCKETS, DEPTHS, RANKS = 64, 9, 3  # of confidence, depth and rank; whatever is beyond the last counts as the last
ALONE, AGREED, CONTESTED, OPINIONS = 0, 1, 2, 3  # what others say of a node: nothing, the same, something else


def guesses(tree: DraftTree) -> tuple[list[int], int]:
    """By node, as if its drafter were the only one (`AGREED` or `CONTESTED` may be added); and the tree's depth."""
    found: list[int] = []
    depths: list[int] = []
    ranks: dict[int, int] = {}
    confidence = tree.confidence
    for node, parent in enumerate(tree.parents):
        depth = 1 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        rank = ranks.get(parent, 0)
        ranks[parent] = rank + 1
        sure = 0.5 ** (1 + rank) if confidence is None else confidence[node]
        bucket = min(BUCKETS - 1, int(sure * BUCKETS))
        depth = depth if depth < DEPTHS else DEPTHS - 1
        found.append(OPINIONS * ((bucket * DEPTHS + depth) * RANKS + (rank if rank < RANKS else RANKS - 1)))
    return found, max(depths, default=0)


class Acceptance:
    def __init__(self) -> None:
        # Before anything was seen plain decoding is the best guess: a drafter is thought to claim too much.
        self.estimate = Estimate((OVERCLAIM, 1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 0.3, 0.3, 0.5, 0.7, 0.7))
        self._requests: dict[str, Estimate] = {}
        self._odds: dict[int, float] = {}  # guess -> odds, as of the last refresh

    def odds(self, guess: int) -> float:
        """For a request like any other."""
        odds = self._odds.get(guess)
        if odds is None:
            odds = self._odds[guess] = math.exp(max(-30.0, min(30.0, self.estimate.at(_features(guess)))))
        return odds

    def factor(self, request_id: str) -> float:
        """On the odds, for this request."""
        own = self._requests.get(request_id)
        return 1.0 if own is None else math.exp(max(-5.0, min(5.0, own.weights[0])))

    def chance(self, guess: int, request_id: str) -> tuple[float, float]:
        """Mean and variance."""
        odds = self.odds(guess) * self.factor(request_id)
        chance = odds / (1.0 + odds)
        own = self._requests.get(request_id)
        doubt = self.estimate.variance(_features(guess)) + (1.0 if own is None else own.variances[0])
        return chance, doubt * (chance * (1.0 - chance)) ** 2

    def learn(self, request_id: str, outcomes: Sequence[tuple[int, bool]]) -> None:
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = Estimate((0.0,), (1.0,))
        for guess, hit in outcomes:
            features = _features(guess)
            log_odds = max(-5.0, min(5.0, self.estimate.at(features) + own.weights[0]))
            chance = 1.0 / (1.0 + math.exp(-log_odds))
            information = chance * (1.0 - chance)
            error, noise = (hit - chance) / information, 1.0 / information
            self.estimate.learn(features, error, noise + own.variances[0])
            own.learn((1.0,), error, noise, PASSAGE)
            num_learned = self.estimate.num_learned
            if num_learned < LASTING // 4 or num_learned % (LASTING // 4) == 0:  # they change slowly by then
                self._odds.clear()

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)


_known_features: dict[int, tuple[float, ...]] = {}


def _features(guess: int) -> tuple[float, ...]:
    features = _known_features.get(guess)
    if features is None:
        rest, others = divmod(guess, OPINIONS)
        rest, rank = divmod(rest, RANKS)
        bucket, depth = divmod(rest, DEPTHS)
        sure = (bucket + 0.5) / BUCKETS
        said = math.log(sure / (1.0 - sure))
        features = (1.0, said, math.log2(depth), float(rank > 0), float(others == AGREED), float(others == CONTESTED))
        _known_features[guess] = features
    return features
