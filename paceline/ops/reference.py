"""Plain twins of every kernel: slow, short, and the definition of what the fast ones must compute.

Each function treats a row on its own: the result for a row is made from that row's inputs alone, by operations whose
shapes do not depend on what else is in the pass. So the bits are the same alone, in a batch, in a tree and in any
chunking, and the batch-invariant decoder on a CPU runs on these very functions. Products are made over copies of the
row at a fixed alignment, because a BLAS adds up in an order that hangs on the address (ops/alignment.py).

A row's keys come in position order: the request's committed positions through the block table, then the node's
ancestors in the pass, ending with itself (see core/forward.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.core.kv_tensor import FLOAT8, as_float8, raw
from paceline.ops.alignment import aligned, aligned_copy


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension, in float32, rounded to the model's dtype before the weight. x: [..., size]"""
    rows = x.reshape(-1, x.shape[-1])
    return torch.stack([_rms_norm_row(row, weight, eps) for row in rows]).view_as(x)


def _rms_norm_row(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = row.float()
    return (wide * torch.rsqrt(wide.square().mean() + eps)).to(row.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [rows, 2 * intermediate] -> [rows, intermediate]"""
    # One call per row: a vectorized loop computes its last few elements by another exp, wherever they fall.
    return torch.stack([F.silu(gate) * up for gate, up in (row.chunk(2) for row in gate_up)])


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with tanh's approximation. gate_up: [rows, 2 * intermediate] -> [rows, intermediate]"""
    if gate_up.is_cuda:  # every element is computed the same way there
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
    return torch.stack([F.gelu(gate, approximate="tanh") * up for gate, up in (row.chunk(2) for row in gate_up)])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, in], weight: [out, in] -> [rows, out], one product per row."""
    weight = aligned(weight)
    return torch.cat([F.linear(aligned_copy(row), weight, bias) for row in torch.split(x, 1)])


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimension i together with i + head_dim / 2. x: [rows, heads, head_dim]; cos, sin: [rows, head_dim / 2]"""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Store each row. key, value: [rows, kv_heads, head_dim]; kv_layer: [2, slots, kv_heads, head_dim]"""
    slots = slot_mapping.long()
    for rows, place in zip((key, value), raw(kv_layer), strict=True):
        place.index_copy_(0, slots, raw(as_float8(rows)) if kv_layer.dtype == FLOAT8 else rows)


def read_kv(part: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of these slots; those in FLOAT8 become `dtype`. part: [slots, kv_heads, head_dim]"""
    found = raw(part)[slots]
    return found.view(FLOAT8).to(dtype) if part.dtype == FLOAT8 else found


def row_slots(batch: ForwardBatch) -> list[list[int]]:
    """For each row, the KV slots of its keys in position order; the last one is the row's own."""
    context_lens, parents = batch.context_lens.tolist(), batch.parents.tolist()
    own_slots, is_node = batch.slot_mapping.tolist(), batch.is_node.tolist()
    tables, req_ids = batch.block_tables.tolist(), batch.req_ids.tolist()
    size = batch.block_size
    result = []
    for row in range(batch.num_rows):
        table = tables[req_ids[row]]
        slots = [table[p // size] * size + p % size for p in range(context_lens[row])]
        path = []
        node = row if is_node[row] else -1
        while node >= 0:
            path.append(own_slots[node])
            node = parents[node]
        result.append(slots + path[::-1])
    return result


def paged_tree_attention(
    query: Tensor,  # [rows, heads, head_dim]
    kv_layer: Tensor,  # [2, slots, kv_heads, head_dim]
    slots: list[list[int]],  # per row, from row_slots()
    window: int | None,
    scale: float,
) -> Tensor:  # [rows, heads, head_dim]
    """Attention row by row. A window of w sees the w last positions, the row's own included."""
    rows = []
    for row, row_slot in enumerate(slots):
        seen = row_slot if window is None else row_slot[-window:]
        index = torch.tensor(seen, device=kv_layer.device)
        key, value = (read_kv(part, index, torch.float32) for part in kv_layer)  # [keys, kv_heads, head_dim]
        rows.append(_attend(query[row], key, value, scale))
    return torch.stack(rows)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    num_heads, head_dim = query.shape
    grouped = aligned_copy(query.float()).view(key.shape[1], -1, head_dim)  # [kv_heads, heads per kv head, head_dim]
    scores = torch.matmul(grouped, key.float().permute(1, 2, 0)) * scale  # [kv_heads, group, keys]
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.matmul(weights, value.float().transpose(0, 1))  # [kv_heads, group, head_dim]
    return mixed.reshape(num_heads, head_dim).to(query.dtype)
