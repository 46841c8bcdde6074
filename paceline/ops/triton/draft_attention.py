"""Attention of draft nodes: the rows of a request share its context, and each sees its own ancestors after that.

Slots of a request's context stand in its line of a table. Nodes have scratch slots, level after level, and a row's
`ancestors` say which node of each level it may see. A program has all rows and all query heads of one request and one
key head, so that keys are read once. Where there are few requests several programs share a context: each takes every
n-th stretch of it, and the one that finishes last joins what they found.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel

KEYS, WIDE_HEAD, FEWER_KEYS = 64, 128, 32  # keys of one product, and from this head size on: what fits beside queries
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
MAX_PARTS = 8  # programs that share a context: more shorten the way through a long one, and have more to join


class Contexts(Protocol):
    @property
    def table(self) -> Tensor: ...  # [lines, positions] int32: slots

    @property
    def table_rows(self) -> Tensor: ...  # [R] int32: the line of each request

    @property
    def context_lens(self) -> Tensor: ...  # [R] int32, with the stride of table_rows


@dataclass(frozen=True, slots=True)
class PathScratch:
    """What several programs found of one context, before it is joined."""

    best: Tensor  # float32
    total: Tensor  # float32
    mixed: Tensor  # float32
    arrivals: Tensor  # int32 zeros

    @staticmethod
    def allocate(
        max_requests: int, width: int, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> "PathScratch":
        lines = max(num_parts(r, kv_heads) * r for r in range(1, max_requests + 1)) * kv_heads
        lines *= _queries(width, heads // kv_heads)
        return PathScratch(
            best=torch.empty(lines, dtype=torch.float32, device=device),
            total=torch.empty(lines, dtype=torch.float32, device=device),
            mixed=torch.empty(lines * dim, dtype=torch.float32, device=device),
            arrivals=torch.zeros(max_requests * kv_heads, dtype=torch.int32, device=device),
        )


def num_parts(num_requests: int, kv_heads: int) -> int:
    """How many programs share a context: enough to fill the GPU."""
    return max(1, min(MAX_PARTS, WANTED_PROGRAMS // (num_requests * kv_heads)))


def _queries(width: int, share: int) -> int:
    """Lines of a program, a power of two."""
    return max(16, 1 << (width * share - 1).bit_length())


@triton.jit
def _join(best, total, mixed, own_best, own_total, own_mixed):
    new_best = tl.maximum(best, own_best)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen no key yet
    shrink, own_shrink = tl.exp(best - safe), tl.exp(own_best - safe)
    total = total * shrink + own_total * own_shrink
    mixed = mixed * shrink[:, None] + own_mixed * own_shrink[:, None]
    return new_best, total, mixed


@triton.jit
def _step(q, slot, ok, kv, values, kv_head, dims, dim_ok, best, total, mixed, scale,
          KV_HEADS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One product more. slot: [keys] int64; ok: [queries or 1, keys]"""
    at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dims[None, :]
    there = tl.max(ok.to(tl.int32), axis=0)[:, None] > 0
    key = tl.load(kv + at, mask=there & dim_ok[None, :], other=0.0)
    value = tl.load(values + at, mask=there & dim_ok[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where(ok, scores, float("-inf"))
    own_best = tl.max(scores, axis=1)
    weights = tl.exp(scores - tl.where(own_best == float("-inf"), 0.0, own_best)[:, None])
    own_mixed = tl.dot(weights, value, input_precision=PRECISION)
    return _join(best, total, mixed, own_best, tl.sum(weights, axis=1), own_mixed)


@triton.jit(do_not_specialize=["num_slots", "table_stride", "query_rows", "depth", "first_scratch", "levels", "parts"])
def _attend_kernel(
    query, kv, out, table, table_rows, context_lens, ancestors, part_best, part_total, part_mixed, arrivals,
    record, table_stride, num_slots, query_rows, depth, first_scratch, levels, parts, scale,
    WIDTH: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    request, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + request * record)
    parts = tl.minimum(parts, tl.maximum((context + KEYS - 1) // KEYS, 1))
    if part >= parts:
        return  # a short context has nothing for this one
    share: tl.constexpr = Q_HEADS // KV_HEADS
    lines, dims = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)  # a line: (row, member of the group)
    rows, members = lines // share, lines % share
    line_ok, dim_ok = rows < WIDTH, dims < DIM
    heads = kv_head * share + members
    q_ok = line_ok[:, None] & dim_ok[None, :]
    # Of `query_rows` rows of a request the last ones are asked for.
    q_rows = request * query_rows + query_rows - WIDTH + rows
    q = tl.load(query + (q_rows * Q_HEADS + heads)[:, None] * DIM + dims[None, :], mask=q_ok, other=0.0)
    values = kv + num_slots.to(tl.int64) * KV_HEADS * DIM
    slots = table + tl.load(table_rows + request * record).to(tl.int64) * table_stride

    best = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, DIM_PAD), dtype=tl.float32)
    for start in range(part * KEYS, context, parts * KEYS):
        at = start + tl.arange(0, KEYS)
        ok = at < context
        slot = tl.load(slots + at, mask=ok, other=0).to(tl.int64)
        best, total, mixed = _step(q, slot, ok[None, :] & line_ok[:, None], kv, values, kv_head, dims, dim_ok, best,
                                   total, mixed, scale, KV_HEADS, DIM, PRECISION)  # fmt: skip
    # Nodes: WIDTH of each level above this one. The last part is the least likely to have one stretch more.
    num_nodes = tl.where(part == parts - 1, depth * WIDTH, 0)
    for start in range(0, num_nodes, KEYS):
        nodes = start + tl.arange(0, KEYS)
        node_ok = nodes < num_nodes
        ancestor_at = (request * WIDTH + rows)[:, None] * levels + (nodes // WIDTH)[None, :]
        seen = line_ok[:, None] & node_ok[None, :]
        seen = seen & (tl.load(ancestors + ancestor_at, mask=seen, other=-1) == (nodes % WIDTH)[None, :])
        slot = first_scratch + request * (levels * WIDTH) + nodes
        best, total, mixed = _step(q, slot, seen, kv, values, kv_head, dims, dim_ok, best, total, mixed, scale,
                                   KV_HEADS, DIM, PRECISION)  # fmt: skip

    arrived = tl.full((), 0, dtype=tl.int32)
    here = request * KV_HEADS + kv_head
    if parts > 1:
        at = (here * parts + part) * QUERIES + lines
        tl.store(part_best + at, best)
        tl.store(part_total + at, total)
        tl.store(part_mixed + at[:, None] * DIM + dims[None, :], mixed, mask=q_ok)
        tl.debug_barrier()  # all threads have written before one of them says so
        arrived = tl.atomic_add(arrivals + here, 1)
    if arrived == parts - 1:
        for other in range(parts):
            if other != part:
                at = (here * parts + other) * QUERIES + lines
                own_best = tl.load(part_best + at, cache_modifier=".cg")
                own_total = tl.load(part_total + at, cache_modifier=".cg")
                mixed_at = part_mixed + at[:, None] * DIM + dims[None, :]
                own_mixed = tl.load(mixed_at, mask=q_ok, other=0.0, cache_modifier=".cg")
                best, total, mixed = _join(best, total, mixed, own_best, own_total, own_mixed)
        total = tl.where(total > 0.0, total, 1.0)  # padding has no keys
        out_at = ((request * WIDTH + rows) * Q_HEADS + heads)[:, None] * DIM + dims[None, :]
        tl.store(out + out_at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=q_ok)
        tl.store(arrivals + here, 0)  # ready for the next call


def attend_paths(
    query: Tensor,  # [R, at least W, heads, dim]: the last W rows of each request ask
    kv: Tensor,  # [2, slots, kv heads, dim]
    contexts: Contexts,
    ancestors: Tensor,  # [R, W, L] int32: which node of each level a row sees
    depth: int,  # levels of nodes that there are
    first_scratch: int,  # slots of nodes: [R, L, W] from here on
    out: Tensor,  # [R, W, heads, dim]: written
    scratch: PathScratch,
    *,
    pdl: int = NO_PDL,
    parts: int | None = None,
) -> None:
    num_requests, query_rows, heads, dim = query.shape
    _, num_slots, kv_heads, _ = kv.shape
    width, levels = ancestors.shape[1:]
    parts = num_parts(num_requests, kv_heads) if parts is None else parts
    queries, dim_pad = _queries(width, heads // kv_heads), max(16, triton.next_power_of_2(dim))
    _attend_kernel[(num_requests, kv_heads, parts)](
        query, kv, out, contexts.table, contexts.table_rows, contexts.context_lens, ancestors,
        scratch.best, scratch.total, scratch.mixed, scratch.arrivals, contexts.table_rows.stride(0),
        contexts.table.stride(0), num_slots, query_rows, depth, first_scratch, levels, parts, dim**-0.5,
        WIDTH=width, Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=dim_pad, QUERIES=queries,
        KEYS=KEYS if dim_pad < WIDE_HEAD else FEWER_KEYS, PRECISION="tf32", PDL=pdl,
        num_warps=4 if queries * dim_pad < 8192 else 8, num_stages=2,
        enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
