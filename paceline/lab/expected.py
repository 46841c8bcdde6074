"""How many tokens one target pass is expected to emit.

A chain of K draft tokens, each accepted with probability g while all before it were, emits on average

    1 + g + g^2 + ... + g^K  =  (1 - g^(K+1)) / (1 - g)

tokens: the accepted ones and one more (recovered or bonus). A tree adds, for every node, the chance that the whole path
down to it is accepted. A chain is a tree of width 1, and no draft at all gives exactly 1.

>>> round(expected_tokens(0.8, 5), 2)
3.69
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidOptionError


def expected_tokens(acceptance: float | Sequence[float], num_draft_tokens: int) -> float:
    """Of a chain. `acceptance`: one rate for all positions, or the rate at each position given the ones before."""
    return 1.0 + float(reach_probabilities(acceptance, num_draft_tokens).sum())


def reach_probabilities(acceptance: float | Sequence[float], num_draft_tokens: int) -> NDArray[np.float64]:
    """[K]: the chance that the draft token at position 1, 2, ... K is accepted, the ones before it included."""
    if num_draft_tokens < 0:
        raise InvalidOptionError(f"the number of draft tokens must be 0 or more, got {num_draft_tokens}")
    rates = np.atleast_1d(np.asarray(acceptance, dtype=np.float64))
    check_rates(rates)
    if rates.size == 1:
        rates = np.repeat(rates, num_draft_tokens)
    if rates.size < num_draft_tokens:
        raise InvalidOptionError(
            f"{rates.size} acceptance rates for {num_draft_tokens} draft tokens: give one rate, or one per position"
        )
    reached: NDArray[np.float64] = np.cumprod(rates[:num_draft_tokens], dtype=np.float64)
    return reached


def expected_tokens_tree(parents: Sequence[int], acceptance_by_rank: Sequence[float]) -> float:
    """Of a tree. `acceptance_by_rank[r]`: the chance that the target's token is the drafter's (r+1)-th choice."""
    return 1.0 + float(sum(node_probabilities(parents, acceptance_by_rank)))


def node_probabilities(parents: Sequence[int], acceptance_by_rank: Sequence[float]) -> list[float]:
    """The chance that each node is accepted. Siblings are ranked in node order."""
    check_ranks(acceptance_by_rank)
    num_children = [0] * (len(parents) + 1)  # [-1] is the root's
    chances: list[float] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidOptionError(f"node {node} has parent {parent}; a parent is -1 or an earlier node")
        rank = num_children[parent]
        num_children[parent] += 1
        here = acceptance_by_rank[rank] if rank < len(acceptance_by_rank) else 0.0
        chances.append(here * (1.0 if parent < 0 else chances[parent]))
    return chances


def best_tree(acceptance_by_rank: Sequence[float], num_nodes: int, max_depth: int) -> list[int]:
    """Parents of the tree with the most expected tokens among all with that many nodes and that depth.

    A node's chance is never above its parent's, so taking the likeliest open node again and again is optimal; Sequoia
    finds the same trees by dynamic programming."""
    check_ranks(acceptance_by_rank)
    if num_nodes < 0 or max_depth < 0:
        raise InvalidOptionError(f"nodes and depth must be 0 or more, got {num_nodes} nodes, depth {max_depth}")
    parents: list[int] = []
    # (-chance, insertion order, parent node, parent's chance, rank, depth): the order keeps ties stable
    open_nodes = [(-acceptance_by_rank[0], 0, -1, 1.0, 0, 1)] if max_depth else []
    order = 1
    while open_nodes and len(parents) < num_nodes:
        chance, _, parent, parent_chance, rank, depth = heapq.heappop(open_nodes)
        if chance == 0.0:
            break  # every open node is impossible: more nodes would only cost
        node = len(parents)
        parents.append(parent)
        if rank + 1 < len(acceptance_by_rank):
            sibling = -parent_chance * acceptance_by_rank[rank + 1]
            heapq.heappush(open_nodes, (sibling, order, parent, parent_chance, rank + 1, depth))
        if depth < max_depth:
            child = (chance * acceptance_by_rank[0], order + 1, node, -chance, 0, depth + 1)
            heapq.heappush(open_nodes, child)
        order += 2
    return parents


def check_rates(rates: NDArray[np.float64]) -> None:
    if rates.ndim != 1 or rates.size == 0 or not bool(np.all((rates >= 0.0) & (rates <= 1.0))):
        raise InvalidOptionError(f"an acceptance rate must be between 0 and 1, got {rates.tolist()}")


def check_ranks(acceptance_by_rank: Sequence[float]) -> None:
    """Ranks exclude each other (the target emits one token), so their rates cannot add up to more than 1."""
    rates = np.asarray(acceptance_by_rank, dtype=np.float64)
    check_rates(rates)
    if rates.sum() > 1.0 + 1e-9:
        raise InvalidOptionError(
            f"acceptance by rank adds up to {rates.sum():.3f}, but the target's token has one rank: at most 1"
        )
    if np.any(np.diff(rates) > 1e-12):
        raise InvalidOptionError(f"acceptance by rank must fall with the rank, got {rates.tolist()}")
