"""From a level's likeliest children to the rows of the next level: path scores, the choice of paths, their rows.

Every child becomes a node, in the order (row, rank). Of all of them the W likeliest paths go on. One program makes one
row of the next level: it finds out which child that is by counting how many are likelier, so no program waits for
another. Paths are summed in float64, as on the host.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.draft_rows import PairMaker, write_pair
from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel

ALL_AT_ONCE = 64  # candidates: up to here all are compared with all in one step
AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes of the trees under construction, level after level: W of the first, W * W of each other one."""

    token_ids: Tensor  # [R, N] int32, the target's
    parents: Tensor  # [R, N] int32; -1: the root
    log_probs: Tensor  # [R, N] float32, given the parent
    paths: Tensor  # [R, N] float64: sums from the root; -inf where the request's width does not reach


@dataclass(frozen=True, slots=True)
class Front:
    """The paths that a level extends, [R, W] each."""

    paths: Tensor  # float64
    nodes: Tensor  # int32
    ancestors: Tensor  # [R, W, L] int32: which row of each level above, and at last itself


@triton.jit
def candidate_paths(log_probs, front_paths, first_row, candidates, count, width, depth, WIDTH: tl.constexpr):
    """Scores of these candidates of a request; its rows begin at `first_row`."""
    ok = candidates < count
    log_prob = tl.load(log_probs + first_row * WIDTH + candidates, mask=ok, other=0.0).to(tl.float64)
    has_parent = candidates < tl.where(depth > 0, count, 0)
    above = tl.load(front_paths + first_row + candidates // WIDTH, mask=has_parent, other=0.0)
    found = above + log_prob
    ok = ok & (candidates % WIDTH < width) & (found == found)
    return tl.where(ok, found, float("-inf"))


@triton.jit(do_not_specialize=["depth", "rows_each", "first_node", "num_nodes", "levels", "goes_on", "first_scratch"])
def _beam_kernel(
    ids, log_probs, front_paths, front_nodes, front_ancestors, features,
    node_tokens, node_parents, node_log_probs, node_paths,
    next_paths, next_nodes, next_ancestors, x, stream, row_positions, row_slots,
    embedding, embedding_norm, hidden_norm, widths, last_positions, record,
    depth, rows_each, first_node, num_nodes, levels, goes_on, first_scratch, eps,
    WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    SIZE: tl.constexpr, PAD: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    request, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.load(widths + request * record)
    first_row = request * rows_each
    count = rows_each * WIDTH
    candidates = tl.arange(0, CANDIDATES)
    ok = candidates < count
    found = candidate_paths(log_probs, front_paths, first_row, candidates, count, width, depth, WIDTH)
    if place == 0:
        at = request * num_nodes + first_node + candidates
        has_parent = candidates < tl.where(depth > 0, count, 0)
        parent = tl.load(front_nodes + first_row + candidates // WIDTH, mask=has_parent, other=-1)
        tl.store(node_tokens + at, tl.load(ids + first_row * WIDTH + candidates, mask=ok, other=0), mask=ok)
        tl.store(node_log_probs + at, tl.load(log_probs + first_row * WIDTH + candidates, mask=ok, other=0.0), mask=ok)
        tl.store(node_parents + at, parent, mask=ok)
        tl.store(node_paths + at, found, mask=ok)
    if goes_on != 0:
        rank = tl.zeros((CANDIDATES,), dtype=tl.int32)
        for start in range(0, count, CHUNK):
            others = start + tl.arange(0, CHUNK)
            path = candidate_paths(log_probs, front_paths, first_row, others, count, width, depth, WIDTH)
            is_first = (others[None, :] < candidates[:, None]) & (others < count)[None, :]
            is_above = (path[None, :] > found[:, None]) | ((path[None, :] == found[:, None]) & is_first)
            rank += tl.sum(is_above.to(tl.int32), axis=1)
        is_mine = ok & (rank == place)
        mine = tl.sum(tl.where(is_mine, candidates, 0), axis=0)
        path = tl.sum(tl.where(is_mine, found, 0.0), axis=0)
        row = request * WIDTH + place
        parent_row = first_row + mine // WIDTH
        tl.store(next_paths + row, tl.where(place < width, path, float("-inf")))
        tl.store(next_nodes + row, first_node + mine)
        level = tl.arange(0, LEVELS)
        above = tl.load(front_ancestors + parent_row * levels + level, mask=level < depth, other=0)
        above = tl.where(level == depth, place, above)
        tl.store(next_ancestors + row * levels + level, above, mask=level < levels)
        tl.store(row_positions + row, tl.load(last_positions + request * record) + depth + 1)
        tl.store(row_slots + row, (first_scratch + (request * levels + depth) * WIDTH + place).to(tl.int32))
        token = tl.load(ids + first_row * WIDTH + mine)
        write_pair(token, features + parent_row * SIZE, embedding, embedding_norm, hidden_norm, x + row * 2 * SIZE,
                   stream + row * SIZE, True, eps, SIZE, PAD, MODE)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NextRows:
    """What the layer reads next, [R * W, ...] each: written."""

    x: Tensor  # [rows, 2 * hidden]
    stream: Tensor  # [rows, hidden]
    positions: Tensor  # int32
    slots: Tensor  # int32


def extend_paths(
    ids: Tensor,  # [R * rows, W] int32: children of the level's rows, one row of each request at depth 0, then W
    log_probs: Tensor,  # [R * rows, W] float32
    features: Tensor,  # [R * rows, hidden] float32: what came out of the level
    front: Front,  # that the level extended; not read at depth 0
    nodes: Nodes,  # the children are added
    next_front: Front | None,  # written; None: this was the last level
    rows: NextRows,
    maker: PairMaker,
    widths: Tensor,  # [R] int32
    last_positions: Tensor,  # [R] int32, with the stride of widths: of the newest pairs
    depth: int,
    first_scratch: int,  # slots of nodes: [R, L, W] from here on
    *,
    pdl: int = NO_PDL,
) -> None:
    num_requests, width, size = len(widths), ids.shape[1], features.shape[1]
    rows_each, levels = len(ids) // num_requests, front.ancestors.shape[2]
    to = next_front or front
    first_node = 0 if depth == 0 else width + (depth - 1) * width * width
    candidates = max(16, triton.next_power_of_2(width * width))
    _beam_kernel[(num_requests, width if next_front is not None else 1)](
        ids, log_probs, front.paths, front.nodes, front.ancestors, features,
        nodes.token_ids, nodes.parents, nodes.log_probs, nodes.paths,
        to.paths, to.nodes, to.ancestors, rows.x, rows.stream, rows.positions, rows.slots,
        maker.embedding, *maker.norms(), widths, last_positions, widths.stride(0),
        depth, rows_each, first_node, nodes.paths.shape[1], levels, int(next_front is not None), first_scratch,
        maker.eps,
        WIDTH=width, CANDIDATES=candidates, CHUNK=candidates if candidates <= ALL_AT_ONCE else AT_A_TIME,
        LEVELS=triton.next_power_of_2(levels), SIZE=size, PAD=triton.next_power_of_2(size), MODE=maker.mode, PDL=pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip


def empty_nodes(num_requests: int, num_nodes: int, device: torch.device) -> Nodes:
    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(num_requests, num_nodes, dtype=dtype, device=device)

    return Nodes(empty(torch.int32), empty(torch.int32), empty(torch.float32), empty(torch.float64))
