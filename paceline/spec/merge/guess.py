"""All that is known of a drafted node before it is verified, as one number: its *guess*.

How sure its drafter is, how deep it lies, and its rank among its siblings. What is learned of nodes is learned by
guess, so that a chance is looked up and not computed.
"""

import math

from paceline.core.tree import DraftTree

BUCKETS, DEPTHS, RANKS = 64, 9, 3  # of confidence, depth and rank; whatever is beyond the last counts as the last


def guesses(tree: DraftTree) -> tuple[list[int], int]:
    """By node; and the tree's depth."""
    found: list[int] = []
    depths: list[int] = []
    ranks: dict[int, int] = {}
    confidence, deepest = tree.confidence, 0
    for node, parent in enumerate(tree.parents):
        depth = 1 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        if depth > deepest:
            deepest = depth
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        bucket = int((0.5 ** (1 + rank) if confidence is None else confidence[node]) * BUCKETS)
        if bucket >= BUCKETS:
            bucket = BUCKETS - 1
        if depth >= DEPTHS:
            depth = DEPTHS - 1
        found.append((bucket * DEPTHS + depth) * RANKS + (rank if rank < RANKS else RANKS - 1))
    return found, deepest


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
