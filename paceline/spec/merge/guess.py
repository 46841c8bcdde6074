"""All that is known of a drafted node before it is verified, as one number: its *guess*.

How sure its drafter is, how deep it lies, its rank among its siblings, and whether other drafters agree. What is
learned of nodes is learned by guess, so that a chance is looked up and not computed.
"""

import math

from paceline.core.tree import DraftTree

BUCKETS, DEPTHS, RANKS = 64, 9, 3  # of confidence, depth and rank; whatever is beyond the last counts as the last
ALONE, AGREED, CONTESTED, OPINIONS = 0, 1, 2, 3  # what others say of a node: nothing, the same, something else


def guesses(tree: DraftTree) -> tuple[list[int], int]:
    """By node, as if its drafter were the only one (`AGREED` or `CONTESTED` may be added); and the tree's depth."""
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
        found.append(OPINIONS * ((bucket * DEPTHS + depth) * RANKS + (rank if rank < RANKS else RANKS - 1)))
    return found, deepest


_known_features: dict[int, tuple[float, ...]] = {}


def features_of(guess: int) -> tuple[float, ...]:
    """(1, the log odds that the drafter gave, depth, rank, others agree, others disagree)"""
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
