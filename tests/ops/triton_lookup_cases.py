"""The kernels of lookups: the trees of `ngram` on the host, node by node. Run by test_triton_drafts.py in a process of
its own, in Triton's interpreter or on a GPU."""

import pytest
import triton

from paceline.ops.triton import lookup
from paceline.spec.proposer import Budget
from tests.ops.lookup_cases import check

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"


@pytest.mark.parametrize(
    ("sizes", "budget"), [(range(1, 4), Budget(4, 4)), (range(1, 4), Budget(11, 4)), (range(2, 6), Budget(3, 7))]
)
def test_trees_are_those_of_the_host(sizes: range, budget: Budget) -> None:
    for seed in range(1 if DEVICE == "cpu" else 20):
        check(lookup, seed, sizes, budget, DEVICE)
