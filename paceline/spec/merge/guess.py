"""All that is known of a drafted node before it is verified, as one number: its *guess*.

How sure its drafter is, how deep it lies, and its rank among its siblings. What is learned of nodes is learned by
guess, so that a chance is looked up and not computed.
"""

import math
from collections.abc import Sequence

BUCKETS, DEPTHS, RANKS = 64, 9, 3  # of confidence, depth and rank; whatever is beyond the last counts as the last


def guesses(confidence: Sequence[float], depths: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Of nodes that lie so deep (1: the next token) and have so many siblings before them."""
    return [
        (int(sure * BUCKETS) if sure < 1.0 else BUCKETS - 1) * (DEPTHS * RANKS)
        + (depth if depth < DEPTHS else DEPTHS - 1) * RANKS
        + (rank if rank < RANKS else RANKS - 1)
        for sure, depth, rank in zip(confidence, depths, ranks, strict=True)
    ]


_known_features: dict[int, tuple[float, ...]] = {}


def features_of(guess: int) -> tuple[float, ...]:
    """(1, the log odds that the drafter gave, depth, rank)"""
    features = _known_features.get(guess)
    if features is None:
        rest, rank = divmod(guess, RANKS)
        bucket, depth = divmod(rest, DEPTHS)
        sure = (bucket + 0.5) / BUCKETS
        features = (1.0, math.log(sure / (1.0 - sure)), math.log2(depth), float(rank > 0))
        _known_features[guess] = features
    return features
