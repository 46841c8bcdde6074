"""The KV tensors themselves, one allocation for all layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.kv_size * dtype.itemsize


def allocate_kv(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers, 2 (keys, values), slots, kv heads, head dim]. Zeroed, so that a masked slot can never hold a NaN."""
    shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def move_slots(kv_cache: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy keys and values of all layers from slot to slot. All reads happen before any write."""
    if not moves:
        return
    source = torch.tensor([src for src, _ in moves], device=kv_cache.device)
    target = torch.tensor([dst for _, dst in moves], device=kv_cache.device)
    kv_cache.index_copy_(2, target, kv_cache.index_select(2, source))
