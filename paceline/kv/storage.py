"""What a token takes in the KV pool, and moving accepted tokens to their place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.kv_tensor import head_elements, raw
from paceline.core.model_config import ModelConfig
from paceline.ops import native


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * head_elements(config, dtype) * dtype.itemsize


def move_slots(kv_cache: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy keys and values of all layers from slot to slot. All reads happen before any write."""
    if not moves:
        return
    if kv_cache.dtype == torch.int16:
        native.move_slots(kv_cache, moves)
        return
    source = torch.tensor([src for src, _ in moves], device=kv_cache.device)
    target = torch.tensor([dst for _, dst in moves], device=kv_cache.device)
    pool = raw(kv_cache)
    pool.index_copy_(2, target, pool.index_select(2, source))
