"""Trees of guesses that do not depend on each other: the likeliest combinations, best first, one request a program.

spec/feature/product_trees.py has the plain twin. A node that is taken brings up to two candidates: the next guess in
its place, and the first guess below it. Of all candidates the likeliest is the next node; of equals the one that is
higher up, then the likelier guess, then the one below the earlier node.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

NONE = tl.constexpr(2147483647)
MOST_RANKS, MOST_NODES = tl.constexpr(64), tl.constexpr(1024)  # what a candidate's number has room for


@triton.jit
def _set(values, at, where, is_new, value):
    return tl.where((at == where) & is_new, value, values)


@triton.jit(do_not_specialize=["level", "width", "most", "num_nodes", "num_levels", "lowest"])
def _product_kernel(
    ids, log_probs, flags, trees, level, width, most, num_nodes, num_levels, num_ranks, lowest,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    at = tl.arange(0, CANDIDATES)
    own = request * width  # of each level: these are `level` apart
    tree = trees + request.to(tl.int64) * (1 + 3 * most)
    first = -tl.load(log_probs + own).to(tl.float64)
    costs = tl.where(at == 0, first, float("inf"))  # of paths: minus their log-probabilities
    places = at * 0  # depth and rank and parent of each candidate, in one number that orders as they do
    count = own * 0
    num_candidates = count + 1
    goes_on = (tl.load(flags + request) != 0) & (-first >= lowest)
    while goes_on & (count < num_nodes):
        cost = tl.min(costs, axis=0)
        place = tl.min(tl.where(costs == cost, places, NONE), axis=0)
        costs = tl.where((costs == cost) & (places == place), float("inf"), costs)
        parent = place % MOST_NODES - 1
        rank = place // MOST_NODES % MOST_RANKS
        depth = place // (MOST_NODES * MOST_RANKS)
        guess = depth * level + own + rank
        log_prob = tl.load(log_probs + guess)
        tl.store(tree + 1 + count, tl.load(ids + guess))
        tl.store(tree + 1 + most + count, parent)
        tl.store(tree + 1 + 2 * most + count, log_prob.to(tl.int32, bitcast=True))
        is_sibling = rank + 1 < num_ranks
        after = tl.load(log_probs + guess + 1, mask=is_sibling, other=0.0).to(tl.float64)
        costs = _set(costs, at, num_candidates, is_sibling, cost + log_prob.to(tl.float64) - after)
        places = _set(places, at, num_candidates, is_sibling, place + MOST_NODES)
        num_candidates += is_sibling.to(tl.int32)
        is_child = depth + 1 < num_levels
        below = tl.load(log_probs + (depth + 1) * level + own, mask=is_child, other=0.0).to(tl.float64)
        costs = _set(costs, at, num_candidates, is_child, cost - below)
        child = (depth + 1) * (MOST_NODES * MOST_RANKS) + count + 1
        places = _set(places, at, num_candidates, is_child, child)
        num_candidates += is_child.to(tl.int32)
        count += 1
        goes_on = -tl.min(costs, axis=0) >= lowest
    tl.store(tree, count)


def product_trees(
    ids: Tensor,  # [levels, R, W] int32, the likeliest first
    log_probs: Tensor,  # [levels, R, W] float32
    flags: Tensor,  # [R] int32: 0: no tree
    trees: Tensor,  # [R, 1 + 3 * K] int32, written: see spec/tree_answers.py
    num_nodes: int,
    max_depth: int,
    lowest: float,  # log-probability from which a path is kept
) -> None:
    num_levels, num_requests, width = ids.shape
    num_ranks = 1 if num_nodes <= max_depth else width  # room for one path only is filled with one path
    assert ids.stride() == log_probs.stride() and ids.stride(1) == width
    assert width <= MOST_RANKS.value and num_nodes < MOST_NODES.value
    _product_kernel[(num_requests,)](
        ids, log_probs, flags, trees, ids.stride(0), width, (trees.shape[1] - 1) // 3, num_nodes,
        min(num_levels, max_depth), num_ranks, lowest,
        CANDIDATES=triton.next_power_of_2(2 * num_nodes + 1), num_warps=1,
    )  # fmt: skip
