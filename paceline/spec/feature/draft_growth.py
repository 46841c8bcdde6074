"""Trees from a drafter's probabilities.

`Growth` (EAGLE-2): level by level the likeliest paths are extended, and of all nodes seen the likeliest are kept. A
path that is already too unlikely to end up among them is not followed, so a drafter that is unsure stops early.

`product_tree` (Medusa, DFlash): the guesses of a depth are the same after every path, so the likeliest nodes can be
picked one after the other, best first.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree, likeliest
from paceline.spec.feature.draft_scores import LOWEST, Floats, Scored
from paceline.spec.proposer import Budget


@dataclass(slots=True)
class Growth:
    """One request's tree under construction. `frontier` are the nodes to be extended next; -1 is the root."""

    request: Request
    budget: Budget
    lowest: float = -math.inf  # log-probability from which a path is worth its row
    followed: float = -math.inf  # and from which it is worth the time to extend it
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of each node, given its parent
    path_log_probs: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])

    def extend(self, token_ids: NDArray[np.int64], log_probs: Floats, width: int) -> None:
        """Children of the frontier, one line per frontier node; the `width` likeliest paths go on."""
        above = np.array([0.0 if node < 0 else self.path_log_probs[node] for node in self.frontier], dtype=np.float64)
        paths: NDArray[np.float64] = (above[:, None] + log_probs.astype(np.float64)).ravel()
        first = len(self.token_ids)
        children = log_probs.shape[1]
        for i, (token, log_prob, path) in enumerate(
            zip(token_ids.ravel().tolist(), log_probs.ravel().tolist(), paths.tolist(), strict=True)
        ):
            self.token_ids.append(token)
            self.parents.append(self.frontier[i // children])
            self.log_probs.append(log_prob)
            self.path_log_probs.append(path)
        self.frontier = self._next_frontier(paths, first, width)

    def _next_frontier(self, paths: NDArray[np.float64], first: int, width: int) -> list[int]:
        order = np.argsort(-paths, kind="stable")[:width]
        floor = max(LOWEST / 2, self.lowest, self.followed)
        if len(self.path_log_probs) > self.budget.num_nodes:
            floor = max(floor, heapq.nlargest(self.budget.num_nodes, self.path_log_probs)[-1])
        return [first + int(i) for i in order if paths[i] >= floor]

    def tree(self) -> DraftTree:
        """The likeliest nodes."""
        nodes = likeliest(self.path_log_probs, self.budget.num_nodes, max(LOWEST / 2, self.lowest))
        if not nodes:
            return EMPTY_TREE
        kept = DraftTree(self.token_ids, self.parents).keep(nodes)
        return DraftTree(
            kept.token_ids,
            kept.parents,
            torch.stack([self.probs[i] for i in nodes]) if self.probs else None,
            confidence=None if self.probs else [math.exp(self.log_probs[i]) for i in nodes],
        )


def product_tree(
    token_ids: NDArray[np.int64], log_probs: Floats, budget: Budget, lowest: float = -math.inf
) -> DraftTree:
    """token_ids, log_probs: [depths, ranks], likeliest first; paths below `lowest` are left out."""
    ids, chances = token_ids.tolist(), log_probs.tolist()
    depths, ranks = log_probs.shape
    if budget.num_nodes <= budget.max_depth:
        ranks = 1  # room for one path only is filled with one path
    tree = DraftTree([], [], confidence=[])
    assert tree.confidence is not None
    heap = [(-chances[0][0], 0, 0, -1)]  # (-log-probability of the path, depth, rank, parent)
    while heap and len(tree.token_ids) < budget.num_nodes:
        negative, depth, rank, parent = heapq.heappop(heap)
        if -negative < max(LOWEST / 2, lowest):
            break
        node = len(tree.token_ids)
        tree.token_ids.append(ids[depth][rank])
        tree.parents.append(parent)
        tree.confidence.append(math.exp(chances[depth][rank]))
        if rank + 1 < ranks:
            sibling = negative + chances[depth][rank] - chances[depth][rank + 1]
            heapq.heappush(heap, (sibling, depth, rank + 1, parent))
        if depth + 1 < min(depths, budget.max_depth):
            heapq.heappush(heap, (negative - chances[depth + 1][0], depth + 1, 0, node))
    return tree if tree.token_ids else EMPTY_TREE


def sampled_chain(scored: Scored, rows: NDArray[np.int64], budget: Budget) -> DraftTree:
    """Drawn tokens one below the other, with what each was drawn from. The length does not look at the draws."""
    rows = rows[: min(budget.num_nodes, budget.max_depth)]
    if (scored.log_probs[rows, 0] <= LOWEST / 2).any():  # an option leaves nothing to draw from
        return EMPTY_TREE
    chain = DraftTree.chain(scored.token_ids[rows, 0].tolist())
    return DraftTree(chain.token_ids, chain.parents, torch.stack([scored.probs[i] for i in rows.tolist()]))


def least_log_prob(probability: float) -> float:
    """What a path's log-probability must reach to be kept."""
    return math.log(probability) if probability > 0.0 else -math.inf
