"""Typical acceptance (Medusa): LOSSY, only by explicit choice, and every output made with it says so.

A child is let through if p(x) > min(epsilon, alpha exp(-H(p))): likely enough for how undecided the target is. That
accepts more than any exact rule and changes the distribution. At temperature 0 it is the exact greedy rule.
"""

import math

import numpy as np

from paceline.core.tree import DraftTree
from paceline.ops.random import Purpose
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice
from paceline.verifiers.walk import ROOT, Path, Walk


def typical_walk(tree: DraftTree, dice: Dice, epsilon: float = 0.09, alpha: float = 0.3) -> Walk[Probs]:
    children = tree.children()
    accepted: list[int] = []
    node = ROOT
    while True:
        (p,) = yield (node,)
        threshold = min(epsilon, alpha * math.exp(-_entropy(p)))
        likeliest = max(children[node], key=lambda token: float(p[token]), default=None)
        if likeliest is None or float(p[likeliest]) <= threshold:
            return Path(accepted, dice.choose(p, Purpose.RECOVER))
        node = children[node][likeliest]
        accepted.append(node)


def _entropy(p: Probs) -> float:
    positive = p[p > 0]
    return -float((positive * np.log(positive)).sum())
