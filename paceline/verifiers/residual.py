"""The arithmetic that all the classic rules share: when to let x ~ q through, and what is left of p when not.

q is the distribution that x was really drawn from. A *fixed* draft (n-gram, suffix, top-k trees, argmax) is the point
mass on its token and has no row in `draft_probs`: let through with probability p(x), leaving p without x.
"""

import numpy as np
import torch

from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.sampling_types import Probs


def draft_distribution(tree: DraftTree, node: int, vocab_size: int) -> Probs:
    """q of a node, float64 [vocab], summing to 1."""
    token = tree.token_ids[node]
    q: Probs
    if tree.draft_probs is None:
        q = np.zeros(vocab_size)
        q[token] = 1.0
        return q
    q = np.asarray(tree.draft_probs[node].to("cpu", torch.float64), dtype=np.float64)
    if q.shape != (vocab_size,) or not float(q[token]) > 0.0:
        raise RequestFailedError(
            f"draft node {node} has token {token}, which its draft_probs row of shape {tuple(q.shape)} gives no "
            f"probability over a vocabulary of {vocab_size}: a drafter must report what it really drew from"
        )
    q = q / q.sum()
    return q


def accept_probability(p: Probs, q: Probs, token: int) -> float:
    """min(1, p(x) / q(x))."""
    return min(1.0, float(p[token]) / float(q[token]))


def residual(p: Probs, q: Probs) -> Probs:
    """norm((p - q)+): what p still wants after the mass that it shares with q was handed out."""
    left = (p - q).clip(min=0.0)
    total = float(left.sum())
    # Where p = q nothing is ever rejected but by rounding, and then p itself is right.
    return left / total if total > 0.0 else p


def without(q: Probs, tokens: list[int]) -> Probs:
    """q once `tokens` were drawn and not put back."""
    left = q.copy()
    left[tokens] = 0.0
    total = float(left.sum())
    if total <= 0.0:
        raise RequestFailedError(
            f"after tokens {tokens} were drawn nothing is left of the drafter's distribution, yet it drew another: "
            "were these siblings drawn with replacement? then choose multi_step with replacement=True"
        )
    return left / total
