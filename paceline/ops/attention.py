"""Fast paged tree attention in PyTorch, for CPU and CUDA.

Requests with equally many rows form a group and are computed together: their keys are gathered into one padded tensor,
first the committed positions, then the group's tree nodes, and a mask says which row sees which key. The plan (what to
gather, which row sees which key) is made once per pass and used by every layer.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.ops.reference import read_kv


@dataclass(slots=True)
class AttentionGroup:
    """Requests with the same number of rows; n requests, q rows each, k keys after padding."""

    rows: Tensor  # [n, q] rows of the pass
    slots: Tensor  # [n, k] KV slots to gather
    visible: Tensor  # [n, q, k] bool: the row may attend to the key
    distance: Tensor  # [n, q, k] positions between the row and the key, for sliding windows
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # window -> [n, 1, q, k]

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            visible = self.visible if window is None else self.visible & (self.distance < window)
            self.masks[window] = visible[:, None]
        return self.masks[window]


def plan_attention(batch: ForwardBatch) -> list[AttentionGroup]:
    bounds = batch.cu_query.tolist()
    groups: dict[int, list[int]] = {}  # number of rows -> requests
    for request, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            groups.setdefault(stop - start, []).append(request)
    return [_plan_group(batch, bounds, requests, num_rows) for num_rows, requests in groups.items()]


def _plan_group(batch: ForwardBatch, bounds: list[int], requests: list[int], num_rows: int) -> AttentionGroup:
    device = batch.token_ids.device
    starts = torch.tensor([bounds[r] for r in requests], device=device)
    rows = starts[:, None] + torch.arange(num_rows, device=device)  # [n, q]
    positions = batch.positions[rows].long()
    context_lens = batch.context_lens[rows].long()

    num_context = int(context_lens.max())
    key_positions = torch.arange(num_context, device=device)
    tables = batch.block_tables[torch.tensor(requests, device=device)].long()  # [n, blocks]
    blocks = tables[:, key_positions // batch.block_size]
    # Padding of a table may hold anything; what lies behind it is masked, but must be a slot that exists.
    context_slots = blocks.clamp(min=0) * batch.block_size + key_positions % batch.block_size  # [n, context]
    context_visible = key_positions < context_lens[:, :, None]  # [n, q, context]
    context_distance = positions[:, :, None] - key_positions
    node_columns = _node_columns(batch.is_node[rows])
    if node_columns.numel() == 0:
        return AttentionGroup(rows, context_slots, context_visible, context_distance)

    node_rows = rows[:, node_columns]  # [n, nodes]
    node_slots = batch.slot_mapping[node_rows].long()
    node_visible = _ancestors(batch, rows, starts)[:, :, node_columns]
    node_distance = positions[:, :, None] - batch.positions[node_rows].long()[:, None, :]
    return AttentionGroup(
        rows,
        torch.cat([context_slots, node_slots], dim=1),
        torch.cat([context_visible, node_visible], dim=2),
        torch.cat([context_distance, node_distance], dim=2),
    )


def _node_columns(is_node: Tensor) -> Tensor:
    """Columns [j] where any request of the group has a tree node. is_node: [n, q]"""
    return is_node.any(dim=0).nonzero()[:, 0]


def _ancestors(batch: ForwardBatch, rows: Tensor, starts: Tensor) -> Tensor:
    """[n, q, q] bool: column j is row i itself or an ancestor of it (tree nodes only)."""
    is_node = batch.is_node[rows]
    num_requests, num_rows = rows.shape
    ancestors = torch.zeros(num_requests, num_rows, num_rows, dtype=torch.bool, device=rows.device)
    # A path is climbed one generation at a time, all rows at once; -1 has arrived at the top.
    current = torch.where(is_node, rows, -1)
    while bool((current >= 0).any()):
        climbing = current >= 0
        column = torch.where(climbing, current - starts[:, None], 0)
        ancestors.scatter_(2, column[:, :, None], climbing[:, :, None] | ancestors.gather(2, column[:, :, None]))
        current = torch.where(climbing, batch.parents[current.clamp(min=0)].long(), -1)
    return ancestors


def attend(
    query: Tensor,  # [rows, heads, head_dim]
    kv_layer: Tensor,  # [2, slots, kv_heads, head_dim]
    plan: list[AttentionGroup],
    window: int | None,
    scale: float,
) -> Tensor:  # [rows, heads, head_dim]
    output = torch.empty_like(query)
    for group in plan:
        # each [n, kv_heads, k, head_dim]
        key, value = (read_kv(part, group.slots, query.dtype).transpose(1, 2) for part in kv_layer)
        mixed = F.scaled_dot_product_attention(
            query[group.rows].transpose(1, 2),  # [n, heads, q, head_dim]
            key,
            value,
            attn_mask=group.mask(window),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output[group.rows] = mixed.transpose(1, 2)
    return output
