"""Attention of draft nodes: the rows of a request share its context, and each sees its own ancestors after that.

Slots of a request's context stand in its line of a table. Nodes have scratch slots, and `visible` says which of them a
row may see. One program has all rows and all query heads of one request and one key head, so that keys are read once.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64  # of one product


class Contexts(Protocol):
    @property
    def table(self) -> Tensor: ...  # [lines, positions] int32: slots

    @property
    def table_rows(self) -> Tensor: ...  # [R] int64: the line of each request

    @property
    def context_lens(self) -> Tensor: ...  # [R] int32


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
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen no key yet
    shrink = tl.exp(best - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = mixed * shrink[:, None] + tl.dot(weights, value, input_precision=PRECISION)
    return new_best, total, mixed


@triton.jit(do_not_specialize=["num_slots", "table_stride"])
def _attend_kernel(
    query, kv, out, table, table_rows, context_lens, scratch, visible, table_stride, num_slots, scale,
    WIDTH: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, TAIL: tl.constexpr, TAIL_PAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share: tl.constexpr = Q_HEADS // KV_HEADS
    lines, dims = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)  # a line: (row, member of the group)
    rows, members = lines // share, lines % share
    line_ok, dim_ok = rows < WIDTH, dims < DIM
    q_at = ((request * WIDTH + rows) * Q_HEADS + kv_head * share + members)[:, None] * DIM + dims[None, :]
    q_ok = line_ok[:, None] & dim_ok[None, :]
    q = tl.load(query + q_at, mask=q_ok, other=0.0)
    values = kv + num_slots.to(tl.int64) * KV_HEADS * DIM
    slots = table + tl.load(table_rows + request) * table_stride
    context = tl.load(context_lens + request)

    best = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, DIM_PAD), dtype=tl.float32)
    for start in range(0, context, KEYS):
        at = start + tl.arange(0, KEYS)
        ok = at < context
        slot = tl.load(slots + at, mask=ok, other=0).to(tl.int64)
        best, total, mixed = _step(q, slot, ok[None, :] & line_ok[:, None], kv, values, kv_head, dims, dim_ok, best,
                                   total, mixed, scale, KV_HEADS, DIM, PRECISION)  # fmt: skip
    if TAIL > 0:
        nodes = tl.arange(0, TAIL_PAD)
        node_ok = nodes < TAIL
        slot = tl.load(scratch + request * TAIL + nodes, mask=node_ok, other=0)
        seen_at = (request * WIDTH + rows)[:, None] * TAIL + nodes[None, :]
        seen = tl.load(visible + seen_at, mask=line_ok[:, None] & node_ok[None, :], other=0) != 0
        best, total, mixed = _step(q, slot, seen, kv, values, kv_head, dims, dim_ok, best, total, mixed, scale,
                                   KV_HEADS, DIM, PRECISION)  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    tl.store(out + q_at, mixed / total[:, None], mask=q_ok)


def attend_paths(
    query: Tensor,  # [R, W, heads, dim] float32
    kv: Tensor,  # [2, slots, kv heads, dim] float32
    views: Contexts,
    scratch: Tensor,  # [R, T] int64: slots of nodes
    visible: Tensor,  # [R, W, T] bool: what each row sees of them
) -> Tensor:  # as query
    num_requests, width, heads, dim = query.shape
    _, num_slots, kv_heads, _ = kv.shape
    tail = scratch.shape[1]
    query, out = query.contiguous(), torch.empty(query.shape, dtype=torch.float32, device=query.device)
    seen = visible.contiguous().view(torch.int8) if tail else scratch  # never read where there are no nodes
    _attend_kernel[(num_requests, kv_heads)](
        query, kv, out, views.table, views.table_rows, views.context_lens, scratch.contiguous(), seen,
        views.table.stride(0), num_slots, dim**-0.5,
        WIDTH=width, Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        QUERIES=max(16, triton.next_power_of_2(width * (heads // kv_heads))), TAIL=tail,
        TAIL_PAD=max(16, triton.next_power_of_2(tail)), KEYS=KEYS, PRECISION="tf32", num_warps=4,
    )  # fmt: skip
    return out
