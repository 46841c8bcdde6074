"""Expected tokens: the closed form, the tree sum and the best tree, against enumeration."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidOptionError
from paceline.lab.expected import best_tree, expected_tokens, expected_tokens_tree, node_probabilities

RATES = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("rate", "expected"),
    # the K=5 column of the literature's table, and the K=4 values that a well-known chart prints in its place
    [(0.6, (2.31, 2.38)), (0.7, (2.77, 2.94)), (0.8, (3.36, 3.69)), (0.9, (4.10, 4.69))],
)
def test_expected_tokens_of_known_cases(rate: float, expected: tuple[float, float]) -> None:
    assert (round(expected_tokens(rate, 4), 2), round(expected_tokens(rate, 5), 2)) == expected


@given(RATES, st.integers(0, 20))
def test_a_chain_has_the_closed_form(rate: float, k: int) -> None:
    closed = k + 1 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)
    assert expected_tokens(rate, k) == pytest.approx(closed, rel=1e-9)


@given(st.lists(RATES, min_size=1, max_size=6))
def test_rates_by_position_agree_with_enumeration(rates: list[float]) -> None:
    total = 0.0
    for outcome in itertools.product([True, False], repeat=len(rates)):
        chance = 1.0
        for holds, rate in zip(outcome, rates, strict=True):
            chance *= rate if holds else 1 - rate
        accepted = next((i for i, holds in enumerate(outcome) if not holds), len(rates))
        total += chance * (accepted + 1)
    assert expected_tokens(rates, len(rates)) == pytest.approx(total)


@given(RATES, st.integers(0, 12))
def test_a_chain_is_a_tree_of_width_one(rate: float, k: int) -> None:
    chain = list(range(-1, k - 1))
    assert expected_tokens_tree(chain, [rate]) == pytest.approx(expected_tokens(rate, k))


def test_siblings_take_the_next_rank() -> None:
    # root -> (a: rank 0, b: rank 1); a -> c (rank 0)
    assert node_probabilities([-1, -1, 0], [0.5, 0.2]) == pytest.approx([0.5, 0.2, 0.25])


def _all_trees(num_nodes: int) -> list[list[int]]:
    return [list(parents) for parents in itertools.product(*[range(-1, i) for i in range(num_nodes)])]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 0.6), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 4))
def test_best_tree_beats_every_other(weights: list[float], num_nodes: int, max_depth: int) -> None:
    ranks = sorted((weight / max(1.0, sum(weights)) for weight in weights), reverse=True)
    best = best_tree(ranks, num_nodes, max_depth)

    def depth(parents: list[int]) -> int:
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    assert len(best) <= num_nodes and depth(best) <= max_depth
    others = [tree for tree in _all_trees(num_nodes) if depth(tree) <= max_depth]
    most = max(expected_tokens_tree(tree, ranks) for tree in others)
    assert expected_tokens_tree(best, ranks) == pytest.approx(most)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.2, 3), "between 0 and 1"),
        (lambda: expected_tokens(float("nan"), 3), "between 0 and 1"),
        (lambda: expected_tokens(0.5, -1), "0 or more"),
        (lambda: expected_tokens([0.5, 0.4], 3), "2 acceptance rates for 3"),
        (lambda: expected_tokens_tree([0], [0.5]), "a parent is -1 or an earlier node"),
        (lambda: expected_tokens_tree([-1], [0.7, 0.6]), "adds up to 1.3"),
        (lambda: best_tree([0.2, 0.5], 4, 2), "must fall with the rank"),
    ],
)
def test_impossible_rates_are_refused_with_a_reason(call: object, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        call()  # type: ignore[operator]
