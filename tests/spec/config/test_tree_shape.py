"""Tree shapes by dynamic programming, against every tree there is and against the greedy answer."""

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidOptionError
from paceline.spec.config.tree_shape import fastest_shape, optimal_shape

Rates = list[list[float]]


def value(parents: list[int], ranks: list[int], acceptance: Rates) -> float:
    """Expected accepted nodes, straight from the definition."""
    chances: list[float] = []
    depths: list[int] = []
    for parent, rank in zip(parents, ranks, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        above = 1.0 if parent < 0 else chances[parent]
        chances.append(above * acceptance[min(depth, len(acceptance) - 1)][rank])
    return sum(chances)


def best_by_brute_force(acceptance: Rates, num_nodes: int, max_depth: int) -> float:
    """Try every set of nodes of the full tree that is closed under parents."""
    full: list[tuple[int, ...]] = []
    for depth in range(1, max_depth + 1):
        levels = [range(len(acceptance[min(d, len(acceptance) - 1)])) for d in range(depth)]
        full += itertools.product(*levels)
    best = 0.0
    for size in range(num_nodes + 1):
        for nodes in itertools.combinations(full, size):
            chosen = set(nodes)
            if all(len(node) == 1 or node[:-1] in chosen for node in nodes):
                total = 0.0
                for node in nodes:
                    chance = 1.0
                    for d, rank in enumerate(node):
                        chance *= acceptance[min(d, len(acceptance) - 1)][rank]
                    total += chance
                best = max(best, total)
    return best


def best_first(acceptance: Rates, num_nodes: int, max_depth: int) -> float:
    """Where rates fall with rank, taking the likeliest node again and again is optimal too."""
    heap = [(-rate, 1) for rate in acceptance[0]]
    heapq.heapify(heap)
    total = 0.0
    for _ in range(num_nodes):
        if not heap:
            break
        negative, depth = heapq.heappop(heap)
        total -= negative
        if depth < max_depth:
            for rate in acceptance[min(depth, len(acceptance) - 1)]:
                heapq.heappush(heap, (negative * rate, depth + 1))
    return total


@pytest.mark.parametrize("acceptance", [[[0.6, 0.3]], [[0.2, 0.7]], [[0.5, 0.4], [0.9, 0.1]], [[0.5, 0.0]]], ids=str)
@pytest.mark.parametrize("num_nodes", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("max_depth", [1, 2, 3])
def test_no_tree_is_better(acceptance: Rates, num_nodes: int, max_depth: int) -> None:
    shape = optimal_shape(acceptance, num_nodes, max_depth)
    assert shape.expected_accepted == pytest.approx(best_by_brute_force(acceptance, num_nodes, max_depth))
    assert value(shape.parents, shape.ranks, acceptance) == pytest.approx(shape.expected_accepted)


rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).map(lambda r: sorted(r, reverse=True))


@given(st.lists(rates, min_size=1, max_size=3), st.integers(0, 24), st.integers(1, 6))
def test_the_shape_is_a_tree_of_that_value(acceptance: Rates, num_nodes: int, max_depth: int) -> None:
    shape = optimal_shape(acceptance, num_nodes, max_depth)
    assert len(shape) <= num_nodes
    depths: list[int] = []
    siblings: set[tuple[int, int]] = set()
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        assert -1 <= parent < node
        assert (parent, rank) not in siblings
        siblings.add((parent, rank))
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths, default=0) <= max_depth
    assert value(shape.parents, shape.ranks, acceptance) == pytest.approx(shape.expected_accepted)
    assert shape.expected_accepted == pytest.approx(best_first(acceptance, num_nodes, max_depth))


def test_a_chain_where_only_the_first_rank_is_ever_right() -> None:
    shape = optimal_shape([[0.8, 0.0]], 4, 8)
    assert shape.parents == [-1, 0, 1, 2] and shape.ranks == [0, 0, 0, 0]
    assert shape.expected_tokens == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4)


def test_cost_decides_the_size() -> None:
    rates = [[0.7, 0.15, 0.05]]
    free = fastest_shape(rates, 16, 5, lambda nodes: 1.0, lambda depth: 0.0)
    expensive = fastest_shape(rates, 16, 5, lambda nodes: 1.0 + 0.2 * nodes, lambda depth: 0.0)
    too_slow = fastest_shape(rates, 16, 5, lambda nodes: 1.0 + 2.0 * nodes, lambda depth: 0.0)
    slow_drafter = fastest_shape(rates, 16, 5, lambda nodes: 1.0, lambda depth: 0.5 * depth)
    assert len(free) == 16 and 0 < len(expensive) < 16 and len(too_slow) == 0
    assert 0 < max_depth_of(slow_drafter.parents) < 5


def max_depth_of(parents: list[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


@pytest.mark.parametrize("acceptance", [[], [[]], [[1.2]], [[-0.1]]], ids=str)
def test_bad_rates_are_refused(acceptance: Rates) -> None:
    with pytest.raises(InvalidOptionError, match="acceptance"):
        optimal_shape(acceptance, 4, 2)
