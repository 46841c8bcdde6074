"""The best shape of a draft tree, by dynamic programming (Sequoia).

Given `acceptance[d][k]`, the chance that the k-th likeliest child of a right node at depth d is right, the expected
number of accepted nodes is the sum over nodes of the product of chances along their path. The best tree of n nodes and
depth D splits its nodes among the children of the root, each child's subtree being the best one of its size:

    best(d, n)    = 1 + split(d, 0, n - 1)                                  a node and its subtree, n nodes in all
    split(d, k, m) = max_j  acceptance[d][k] best(d + 1, j) + split(d, k + 1, m - j)      children of rank k and on

>>> shape = optimal_shape([[0.6, 0.3]], num_nodes=3, max_depth=2)
>>> shape.parents, shape.ranks, round(shape.expected_accepted, 2)
([-1, -1, 0], [0, 1, 0], 1.26)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class TreeShape:
    parents: list[int]  # parents[i] < i; -1 is the root
    ranks: list[int]  # the node is its parent's ranks[i]-th likeliest child
    expected_accepted: float

    @property
    def expected_tokens(self) -> float:
        """Tokens per target pass: the accepted nodes and one more."""
        return 1.0 + self.expected_accepted

    def __len__(self) -> int:
        return len(self.parents)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Values and choices of the recursion, over depth, first rank and number of nodes."""

    split: NDArray[np.float64]  # [depth, rank, nodes]
    taken: NDArray[np.int32]  # [depth, rank, nodes]: nodes of the child of this rank


def optimal_shape(acceptance: Sequence[Sequence[float]], num_nodes: int, max_depth: int) -> TreeShape:
    """The tree of at most `num_nodes` nodes with the most expected accepted ones.

    `acceptance[d][k]` is for children at depth d + 1; below the last row given, the last row holds."""
    _check(acceptance, num_nodes, max_depth)
    return _shape(_solve(acceptance, num_nodes, max_depth), num_nodes)


def fastest_shape(
    acceptance: Sequence[Sequence[float]],
    max_nodes: int,
    max_depth: int,
    verify_s: Callable[[int], float],  # seconds of a target pass with that many draft nodes
    draft_s: Callable[[int], float],  # seconds to draft a tree of that depth
) -> TreeShape:
    """The tree with the most expected tokens per second; the empty one where drafting does not pay."""
    _check(acceptance, max_nodes, max_depth)
    best, best_speed = TreeShape([], [], 0.0), 1.0 / verify_s(0)
    for depth in range(1, max_depth + 1):
        plan = _solve(acceptance, max_nodes, depth)
        for nodes in range(1, max_nodes + 1):
            speed = (1.0 + plan.split[0, 0, nodes]) / (verify_s(nodes) + draft_s(depth))
            if speed > best_speed:
                best, best_speed = _shape(plan, nodes), speed
    return best


def _check(acceptance: Sequence[Sequence[float]], num_nodes: int, max_depth: int) -> None:
    if num_nodes < 0 or max_depth < 0:
        raise InvalidOptionError(f"a tree needs sizes of 0 or more, got {num_nodes} nodes, depth {max_depth}")
    if not acceptance or not all(acceptance):
        raise InvalidOptionError(
            "acceptance needs at least one row with the chance of at least one rank, such as [[0.6, 0.2]]"
        )
    if any(not 0.0 <= chance <= 1.0 for row in acceptance for chance in row):
        raise InvalidOptionError(f"acceptance holds chances from 0 to 1, got {acceptance!r}")


def _solve(acceptance: Sequence[Sequence[float]], num_nodes: int, max_depth: int) -> _Plan:
    num_ranks = max(len(row) for row in acceptance)
    split = np.zeros((max_depth + 1, num_ranks + 1, num_nodes + 1))
    taken = np.zeros((max_depth + 1, num_ranks + 1, num_nodes + 1), dtype=np.int32)
    nodes = np.arange(num_nodes + 1)
    others = nodes[:, None] - nodes[None, :]  # [nodes, j]: left for the children of higher rank
    impossible = others < 0
    for depth in range(max_depth - 1, -1, -1):
        row = acceptance[min(depth, len(acceptance) - 1)]
        subtree = np.concatenate([[0.0], 1.0 + split[depth + 1, 0, :-1]])  # best(depth + 1, j) for j nodes
        for rank in range(len(row) - 1, -1, -1):
            # values[n, j]: j of n nodes for this child
            values = row[rank] * subtree[None, :] + split[depth, rank + 1][others]
            values[impossible] = -1.0
            taken[depth, rank] = values.argmax(axis=1)
            split[depth, rank] = values.max(axis=1)
    return _Plan(split, taken)


def _shape(plan: _Plan, num_nodes: int) -> TreeShape:
    """Read the tree off the choices, breadth first, so that parents come before children."""
    max_depth, num_ranks = plan.taken.shape[0] - 1, plan.taken.shape[1] - 1
    parents: list[int] = []
    ranks: list[int] = []
    queue = [(-1, 0, num_nodes)]  # (node, depth, nodes below it)
    for node, depth, below in queue:
        if depth >= max_depth:
            continue
        for rank in range(num_ranks):
            size = int(plan.taken[depth, rank, below])
            if size > 0:
                parents.append(node)
                ranks.append(rank)
                queue.append((len(parents) - 1, depth + 1, size - 1))
                below -= size
    return TreeShape(parents, ranks, float(plan.split[0, 0, num_nodes]))
