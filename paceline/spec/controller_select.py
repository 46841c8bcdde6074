"""Which draft nodes go into the next pass: those that raise the whole batch's tokens per second, and no others.

A node brings the chance that its whole path is accepted. All requests' nodes are ranked together by that chance (a
parent never ranks below its child, so any first n of them are trees), and n is chosen to maximize

    (requests + the n largest chances) / T(requests + n)         T: the learned cost of a pass of that many rows

n = 0 is plain decoding. One sort and one maximum decide for the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.tree import DraftTree
from paceline.spec.controller_cost import PassCostModel


@dataclass(frozen=True, slots=True)
class Selection:
    keep: list[list[int]]  # per tree: nodes kept, ascending
    gains: list[float]  # per tree: expected accepted tokens of the nodes kept
    num_nodes: int
    plain_s: float  # expected time of the pass without drafts
    pass_s: float  # and with the nodes kept
    speedup: float  # expected, over plain decoding
    loss_s: float  # where nothing pays: what the best non-empty choice would lose; 0.0 otherwise


def path_chances(tree: DraftTree, bias: float) -> list[float]:
    """The chance that each node is accepted with all its ancestors; `bias` shifts the drafter's own odds."""
    assert tree.confidence is not None
    odds_factor = float(np.exp(bias))
    chances: list[float] = []
    for parent, confidence in zip(tree.parents, tree.confidence, strict=True):
        own = odds_factor * confidence / (1.0 - confidence + odds_factor * confidence) if confidence < 1.0 else 1.0
        chances.append(own if parent < 0 else own * chances[parent])
    return chances


def select(
    chances: Sequence[Sequence[float]],  # per tree: path_chances
    num_requests: int,  # in the next pass, with or without a tree
    cost: PassCostModel,
    margin: float,  # expected speedup below which nothing is drafted
    force: bool = False,  # take the best non-empty choice even where it loses
) -> Selection:
    flat = np.fromiter((chance for tree in chances for chance in tree), dtype=np.float64)
    order = np.argsort(-flat, kind="stable")
    gains = np.concatenate([[0.0], np.cumsum(flat[order])])
    seconds = cost.seconds(num_requests + np.arange(len(gains)))
    rates: NDArray[np.float64] = (num_requests + gains) / seconds
    best = int(np.argmax(rates))
    loss_s = 0.0
    if rates[best] < margin * rates[0] or best == 0:
        best = 0
        if len(gains) > 1:
            least_bad = 1 + int(np.argmax(rates[1:]))
            loss_s = float(seconds[least_bad] - (num_requests + gains[least_bad]) / rates[0])
            best = least_bad if force else 0
    kept = np.zeros(len(flat), dtype=bool)
    kept[order[:best]] = True
    return Selection(
        *_by_tree(chances, flat, kept),
        num_nodes=best,
        plain_s=float(seconds[0]),
        pass_s=float(seconds[best]),
        speedup=float(rates[best] / rates[0]),
        loss_s=max(0.0, loss_s),
    )


def _by_tree(
    chances: Sequence[Sequence[float]], flat: NDArray[np.float64], kept: NDArray[np.bool_]
) -> tuple[list[list[int]], list[float]]:
    keep: list[list[int]] = []
    gains: list[float] = []
    begin = 0
    for tree in chances:
        end = begin + len(tree)
        keep.append(np.flatnonzero(kept[begin:end]).tolist())
        gains.append(float(flat[begin:end][kept[begin:end]].sum()))
        begin = end
    return keep, gains
