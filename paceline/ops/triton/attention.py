"""Paged tree attention, one program per row and key/value head, keys in position order.

Key number k of a row is its request's position k while k is below the row's context, and after that the row's ancestor
at that depth, found by climbing `parents`. Blocks of keys are counted from key 0, and a softmax runs over them from
front to back. So a tree node and the same token in plain text do the same arithmetic on the same numbers: same bits.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.forward import ForwardBatch

KEY_BLOCK = 64
MIN_GROUP = 16  # the smallest side that a tensor core product takes


@triton.jit
def _attention_kernel(
    query, kv, out, positions, slots, context_lens, parents, is_node, req_ids, tables,
    table_stride, block_size, num_slots, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, DIM_PAD: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group_size = HEADS // KV_HEADS
    members, dims = tl.arange(0, GROUP), tl.arange(0, DIM_PAD)
    member_ok, dim_ok = members < group_size, dims < DIM
    q_at = (row * HEADS + kv_head * group_size + members[:, None]) * DIM + dims[None, :]
    q = tl.load(query + q_at, mask=member_ok[:, None] & dim_ok[None, :], other=0.0)  # [group, dim]

    context = tl.load(context_lens + row)
    # A node at depth d comes after its context and its d - 1 ancestors; a committed row lies in its own context.
    depth = tl.where(tl.load(is_node + row), tl.load(positions + row) + 1 - context, 0)
    num_keys = context + depth
    first = tl.maximum(num_keys - window, 0) if window > 0 else 0
    table = tables + tl.load(req_ids + row).to(tl.int64) * table_stride

    best = tl.full((GROUP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    mixed = tl.zeros((GROUP, DIM_PAD), dtype=tl.float32)
    for start in range(first // KEYS * KEYS, num_keys, KEYS):
        at = start + tl.arange(0, KEYS)
        ok = (at >= first) & (at < num_keys)
        in_context = ok & (at < context)
        block = tl.load(table + at // block_size, mask=in_context, other=0)
        slot = block * block_size + at % block_size
        if start + KEYS > context:  # some of these keys may be tree nodes
            node = tl.full((KEYS,), 0, dtype=tl.int32) + row.to(tl.int32)
            climbs = num_keys - 1 - at  # generations from the row up to the ancestor at this depth
            for generation in range(depth):
                parent = tl.load(parents + node, mask=ok & (generation < climbs) & (at >= context), other=0)
                node = tl.where(ok & (generation < climbs) & (at >= context), parent, node)
            slot = tl.where(in_context, slot, tl.load(slots + node, mask=ok & (at >= context), other=0))
        kv_at = (slot.to(tl.int64)[:, None] * KV_HEADS + kv_head) * DIM + dims[None, :]
        kv_ok = ok[:, None] & dim_ok[None, :]
        key = tl.load(kv + kv_at, mask=kv_ok, other=0.0)  # [keys, dim]
        value = tl.load(kv + num_slots.to(tl.int64) * KV_HEADS * DIM + kv_at, mask=kv_ok, other=0.0)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        scores = tl.dot(q, tl.trans(key), input_precision=precision) * scale  # [group, keys]
        scores = tl.where(ok[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
        best = new_best
    out_ok = member_ok[:, None] & dim_ok[None, :]
    tl.store(out + q_at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=out_ok)


def paged_tree_attention(
    query: Tensor,  # [rows, heads, head_dim]
    kv_layer: Tensor,  # [2, slots, kv_heads, head_dim]
    batch: ForwardBatch,
    window: int | None,
    scale: float,
) -> Tensor:  # [rows, heads, head_dim]
    query = query.contiguous()
    num_rows, heads, dim = query.shape
    _, num_slots, kv_heads, _ = kv_layer.shape
    out = torch.empty_like(query)
    group = max(MIN_GROUP, triton.next_power_of_2(heads // kv_heads))
    _attention_kernel[(num_rows, kv_heads)](
        query, kv_layer, out, batch.positions, batch.slot_mapping, batch.context_lens, batch.parents, batch.is_node,
        batch.req_ids, batch.block_tables, batch.block_tables.stride(0), batch.block_size, num_slots, window or 0,
        scale, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, GROUP=group, DIM_PAD=triton.next_power_of_2(dim),
        KEYS=KEY_BLOCK, EXACT=query.dtype == torch.float32, num_warps=4,
    )  # fmt: skip
    return out
