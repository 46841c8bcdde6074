"""Paged tree attention in which several programs share a row's keys.

Key number k of a row is its request's position k while k is below the row's context, and after that the row's ancestor
at that depth, found by climbing `parents`. Keys are cut at multiples of SPLIT, counted from key 0; each split has a
softmax of its own, and these are merged from front to back. Which program computed a split, and how many programs
there were, does not show: a tree node and the same token in plain text get the same bits, at any batch size.

With several programs a row (PARTS) the last one to finish merges what all of them left in memory; with one there is
nothing to leave.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel


@dataclass(frozen=True, slots=True)
class Steps:
    """Part of the arithmetic, so the same for every pass of a model."""

    split: int = 128  # keys of one softmax
    keys: int = 128  # keys of one product
    warps: int = 4


STEPS = Steps()
MIN_GROUP = 16  # the smallest side that a tensor core product takes
MAX_PARTS = 16
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU


@triton.jit
def _merge(best, total, mixed, other_best, other_total, other_mixed):
    """Two softmaxes over different keys as one. An empty one has best -inf and takes part with exact zeros."""
    new_best = tl.maximum(best, other_best)
    shrink, other_shrink = tl.exp(best - new_best), tl.exp(other_best - new_best)
    total = total * shrink + other_total * other_shrink
    mixed = mixed * shrink[:, None] + other_mixed * other_shrink[:, None]
    return new_best, total, mixed


@triton.jit
def _key_slots(
    at, ok, row, context, num_keys, depth, table, slots, parents, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr
):
    """Where keys `at` of a row lie."""
    block = tl.load(table + at // BLOCK_SIZE, mask=ok & (at < context), other=0)
    slot = block * BLOCK_SIZE + at % BLOCK_SIZE
    if tl.max(at, axis=0) >= context:  # some of these keys may be tree nodes
        is_node = ok & (at >= context)
        node = tl.zeros((KEYS,), dtype=tl.int32) + row.to(tl.int32)
        climbs = num_keys - 1 - at  # generations from the row up to the ancestor at this depth
        for generation in range(depth - 1):
            climbing = is_node & (generation < climbs)
            node = tl.where(climbing, tl.load(parents + node, mask=climbing, other=0), node)
        slot = tl.where(is_node, tl.load(slots + node, mask=is_node, other=0), slot)
    return slot.to(tl.int64)


@triton.jit(do_not_specialize=["num_slots", "table_stride", "max_splits", "window"])
def _attention_kernel(
    query, kv, out, positions, slots, context_lens, parents, is_node, req_ids, tables,
    part_best, part_total, part_mixed, arrivals, table_stride, num_slots, max_splits, window, scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, DIM_PAD: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group_size: tl.constexpr = Q_HEADS // KV_HEADS
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    members, dims = tl.arange(0, GROUP), tl.arange(0, DIM_PAD)
    heads = row * Q_HEADS + kv_head * group_size + members  # [group], over all rows
    member_ok, dim_ok = members < group_size, dims < DIM
    q_ok = member_ok[:, None] & dim_ok[None, :]
    q_at = heads[:, None] * DIM + dims[None, :]
    q = tl.load(query + q_at, mask=q_ok, other=0.0)  # [group, dim]

    context = tl.load(context_lens + row)
    # A node at depth d comes after its context and its d - 1 ancestors; a committed row lies in its own context.
    depth = tl.where(tl.load(is_node + row) != 0, tl.load(positions + row) + 1 - context, 0)
    num_keys = context + depth
    first = tl.where(window > 0, tl.maximum(num_keys - window, 0), 0)
    first_split, num_splits = first // SPLIT, (num_keys + SPLIT - 1) // SPLIT
    table = tables + tl.load(req_ids + row).to(tl.int64) * table_stride
    values = kv + num_slots.to(tl.int64) * KV_HEADS * DIM

    best = tl.full((GROUP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    mixed = tl.zeros((GROUP, DIM_PAD), dtype=tl.float32)
    for split in range(first_split + part, num_splits, PARTS):
        own_best = tl.full((GROUP,), float("-inf"), dtype=tl.float32)
        own_total = tl.zeros((GROUP,), dtype=tl.float32)
        own_mixed = tl.zeros((GROUP, DIM_PAD), dtype=tl.float32)
        begin = tl.maximum(split * SPLIT, first // KEYS * KEYS)  # a step without any key would be a softmax of nothing
        end = tl.minimum(split * SPLIT + SPLIT, num_keys)
        for start in range(begin, end, KEYS):
            at = start + tl.arange(0, KEYS)
            ok = (at >= first) & (at < num_keys)
            slot = _key_slots(at, ok, row, context, num_keys, depth, table, slots, parents, BLOCK_SIZE, KEYS)
            kv_at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dims[None, :]
            kv_ok = ok[:, None] & dim_ok[None, :]
            key = tl.load(kv + kv_at, mask=kv_ok, other=0.0)  # [keys, dim]
            value = tl.load(values + kv_at, mask=kv_ok, other=0.0)
            scores = tl.dot(q, tl.trans(key), input_precision=precision) * scale  # [group, keys]
            scores = tl.where(ok[None, :], scores, float("-inf"))
            new_best = tl.maximum(own_best, tl.max(scores, axis=1))
            shrink = tl.exp(own_best - new_best)
            weights = tl.exp(scores - new_best[:, None])
            own_total = own_total * shrink + tl.sum(weights, axis=1)
            own_mixed = own_mixed * shrink[:, None]
            own_mixed += tl.dot(weights.to(value.dtype), value, input_precision=precision)
            own_best = new_best
        if PARTS == 1:
            best, total, mixed = _merge(best, total, mixed, own_best, own_total, own_mixed)
        else:
            at_split = heads * max_splits + split
            tl.store(part_best + at_split, own_best, mask=member_ok)
            tl.store(part_total + at_split, own_total, mask=member_ok)
            tl.store(part_mixed + at_split[:, None] * DIM + dims[None, :], own_mixed, mask=q_ok)
    last = True
    if PARTS > 1:
        tl.debug_barrier()  # all threads have written before one of them says so
        counter = arrivals + row * KV_HEADS + kv_head
        last = tl.atomic_add(counter, 1) == PARTS - 1
        if last:
            for split in range(first_split, num_splits):
                at_split = heads * max_splits + split
                own_best = tl.load(part_best + at_split, mask=member_ok, other=0.0, cache_modifier=".cg")
                own_total = tl.load(part_total + at_split, mask=member_ok, other=1.0, cache_modifier=".cg")
                mixed_at = part_mixed + at_split[:, None] * DIM + dims[None, :]
                own_mixed = tl.load(mixed_at, mask=q_ok, other=0.0, cache_modifier=".cg")
                best, total, mixed = _merge(best, total, mixed, own_best, own_total, own_mixed)
            tl.store(counter, 0)  # ready for the next pass
    if last:
        total = tl.where(total > 0.0, total, 1.0)  # a padding row may have no keys
        tl.store(out + q_at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=q_ok)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What attention must know of each row: tensors of a ForwardBatch, or the device step's own."""

    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int32
    context_lens: Tensor  # [rows] int32
    parents: Tensor  # [rows] int32
    is_node: Tensor  # [rows] bool
    req_ids: Tensor  # [rows] int32
    block_tables: Tensor  # [requests, max_blocks] int32
    block_size: int

    def max_splits(self, steps: Steps = STEPS) -> int:
        # The nodes of a tree have slots in the table too, so no path is longer than the table.
        return max(1, -(-self.block_tables.shape[1] * self.block_size // steps.split))


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    best: Tensor  # [rows * heads * max_splits] float32
    total: Tensor  # the same
    mixed: Tensor  # [rows * heads * max_splits * dim] float32
    arrivals: Tensor  # [rows * kv heads] int32 zeros

    @staticmethod
    def allocate(
        num_rows: int, num_heads: int, num_kv_heads: int, dim: int, max_splits: int, device: torch.device
    ) -> "AttentionScratch":
        """Room for a pass of up to this many rows; almost none where `num_parts` gives a row one program."""
        split_rows = num_rows if num_parts(num_rows, num_kv_heads, max_splits) > 1 else 0
        size = max(1, split_rows * num_heads * max_splits)
        return AttentionScratch(
            best=torch.empty(size, dtype=torch.float32, device=device),
            total=torch.empty(size, dtype=torch.float32, device=device),
            mixed=torch.empty(size * dim, dtype=torch.float32, device=device),
            arrivals=torch.zeros(max(1, split_rows * num_kv_heads), dtype=torch.int32, device=device),
        )


def num_parts(num_rows: int, num_kv_heads: int, max_splits: int) -> int:
    """How many programs share a row and head: enough to fill the GPU. A power of two, to have few kernels."""
    wanted = min(MAX_PARTS, max_splits, WANTED_PROGRAMS // max(1, num_rows * num_kv_heads))
    return 1 << (max(1, wanted).bit_length() - 1)


def split_tree_attention(
    query: Tensor,  # [rows, heads, dim]
    kv_layer: Tensor,  # [2, slots, kv_heads, dim]
    out: Tensor,  # [rows, heads, dim]: written
    rows: AttentionRows,
    scratch: AttentionScratch,
    window: int | None,
    scale: float,
    *,
    pdl: int = NO_PDL,
    parts: int | None = None,
    steps: Steps = STEPS,
) -> None:
    num_rows, heads, dim = query.shape
    _, num_slots, kv_heads, _ = kv_layer.shape
    max_splits = rows.max_splits(steps)
    parts = num_parts(num_rows, kv_heads, max_splits) if parts is None else parts
    _attention_kernel[(num_rows, kv_heads, parts)](
        query, kv_layer, out, rows.positions, rows.slots, rows.context_lens, rows.parents, rows.is_node, rows.req_ids,
        rows.block_tables, scratch.best, scratch.total, scratch.mixed, scratch.arrivals, rows.block_tables.stride(0),
        num_slots, max_splits, window or 0, scale,
        Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=rows.block_size,
        GROUP=max(MIN_GROUP, triton.next_power_of_2(heads // kv_heads)), DIM_PAD=max(16, triton.next_power_of_2(dim)),
        KEYS=steps.keys, SPLIT=steps.split, PARTS=parts, EXACT=query.dtype == torch.float32, PDL=pdl,
        num_warps=steps.warps, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
