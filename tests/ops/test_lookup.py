"""Lookups on the device, by their plain twins: the trees of `ngram` on the host, node by node."""

import pytest

from paceline.ops import lookup
from paceline.spec.proposer import Budget
from tests.ops.lookup_cases import check

CHAIN, TREE, WIDE = Budget(4, 4), Budget(11, 4), Budget(24, 3)


@pytest.mark.parametrize("sizes", [range(1, 4), range(2, 6), range(1, 2)], ids=["1-3", "2-5", "1"])
@pytest.mark.parametrize("budget", [CHAIN, TREE, WIDE, Budget(3, 7)], ids=["chain", "tree", "wide", "cut"])
def test_trees_are_those_of_the_host(sizes: range, budget: Budget) -> None:
    for seed in range(6):
        trees = check(lookup, seed, sizes, budget)
        assert sum(bool(tree) for tree in trees) >= 3, "meant to find something"
        if budget is not CHAIN and budget.num_nodes > budget.max_depth:
            assert any(tree.parents.count(-1) > 1 for tree in trees), "meant to branch"
