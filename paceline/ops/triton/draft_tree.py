"""The draft that is offered: of all nodes that were found, the likeliest, in the order in which they were found.

A node is out where its path is below what is worth a row, where its parent's path was below what is worth extending, or
where it is too deep; a parent is never out where its child is in. One program chooses for one request: a node's rank is
how many nodes are likelier.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.draft_beam import Nodes
from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel

AT_A_TIME = 16  # nodes that all others are compared with in one step


class Limits(Protocol):
    """[R], all with the same stride"""

    @property
    def lowest(self) -> Tensor: ...  # float32: path from which a node is kept

    @property
    def followed(self) -> Tensor: ...  # float32: path from which a node is extended

    @property
    def depths(self) -> Tensor: ...  # int32

    @property
    def num_nodes(self) -> Tensor: ...  # int32


@triton.jit
def _scores(paths, parents, nodes, count, lowest, followed, depths, WIDTH: tl.constexpr):
    """The paths of these nodes, -inf where they are out."""
    ok = nodes < count
    path = tl.load(paths + nodes, mask=ok, other=float("-inf"))
    parent = tl.load(parents + nodes, mask=ok, other=-1)
    above = tl.load(paths + parent, mask=ok & (parent >= 0), other=float("inf"))
    depth = tl.where(nodes < WIDTH, 0, 1 + (nodes - WIDTH) // (WIDTH * WIDTH))
    is_in = ok & (path >= lowest) & (above >= followed) & (depth < depths)
    return tl.where(is_in, path, float("-inf"))


@triton.jit(do_not_specialize=["count", "stride", "most"])
def _tree_kernel(
    token_ids, parents, log_probs, paths, places, out, lowest, followed, depths, budgets, record, count, stride, most,
    WIDTH: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    request = tl.program_id(0).to(tl.int64)
    token_ids, parents, log_probs = (
        token_ids + request * stride,
        parents + request * stride,
        log_probs + request * stride,
    )
    paths, places, out = paths + request * stride, places + request * stride, out + request * (1 + 3 * most)
    own = request * record
    low, follow, deep = tl.load(lowest + own), tl.load(followed + own), tl.load(depths + own)
    nodes = tl.arange(0, NODES)
    score = _scores(paths, parents, nodes, count, low, follow, deep, WIDTH)
    rank = tl.zeros((NODES,), dtype=tl.int32)
    for start in range(0, count, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other = _scores(paths, parents, others, count, low, follow, deep, WIDTH)
        is_tie = (other[None, :] == score[:, None]) & (others[None, :] < nodes[:, None])
        rank += tl.sum(((other[None, :] > score[:, None]) | is_tie).to(tl.int32), axis=1)
    kept = (score > float("-inf")) & (rank < tl.minimum(tl.load(budgets + own), most))
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(places + nodes, place, mask=kept)
    tl.debug_barrier()  # a node asks for its parent's place
    parent = tl.load(parents + nodes, mask=kept, other=-1)
    parent_place = tl.load(places + parent, mask=kept & (parent >= 0), other=-1)
    tl.store(out, tl.sum(kept.to(tl.int32), axis=0))
    tl.store(out + 1 + place, tl.load(token_ids + nodes, mask=kept, other=0), mask=kept)
    tl.store(out + 1 + most + place, parent_place, mask=kept)
    bits = tl.load(log_probs + nodes, mask=kept, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out + 1 + 2 * most + place, bits, mask=kept)


def choose_nodes(
    nodes: Nodes,
    num_levels: int,
    width: int,
    limits: Limits,
    places: Tensor,  # [R, N] int32: room
    out: Tensor,  # [R, 1 + 3 * K] int32: number of nodes, their tokens, parents and the bits of their log-probabilities
    *,
    pdl: int = NO_PDL,
) -> None:
    num_requests, stride = nodes.paths.shape
    _tree_kernel[(num_requests,)](
        nodes.token_ids, nodes.parents, nodes.log_probs, nodes.paths, places, out,
        limits.lowest, limits.followed, limits.depths, limits.num_nodes, limits.lowest.stride(0),
        num_found(num_levels, width), stride, (out.shape[1] - 1) // 3,
        WIDTH=width, NODES=max(16, triton.next_power_of_2(stride)), CHUNK=AT_A_TIME, PDL=pdl,
        num_warps=8, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip


def num_found(num_levels: int, width: int) -> int:
    """Nodes of a tree before any is left out."""
    return width + (num_levels - 1) * width * width
