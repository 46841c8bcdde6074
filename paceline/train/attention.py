"""Attention over padded batches, in the shapes that drafter layers use: [sequences, positions, heads, head_dim]."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(*_heads_first(query, key, value), is_causal=True)
    return mixed.transpose(1, 2)


def masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """visible: bool, [queries, keys] or [sequences, 1, queries, keys]"""
    mixed = F.scaled_dot_product_attention(*_heads_first(query, key, value), attn_mask=visible)
    return mixed.transpose(1, 2)


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[sequences, heads, positions, head_dim], keys repeated for the query heads that share them."""
    # PyTorch's memory-efficient kernel takes a mask, but not fewer key heads than query heads.
    share = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(share, dim=2), value.repeat_interleave(share, dim=2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


class TrainingTimeTest:
    """EAGLE-3's attention when the drafter is fed its own features, for all anchors of a sequence at once.

    Draft step i of anchor t sees the true pairs up to t (the keys of step 0) and its own earlier steps: keys of steps
    1..i at anchor t and at no other. Call it once per step, in order."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # one [sequences, positions, kv heads, head_dim] per step
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return causal(query, key, value)
        length = query.shape[1]
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        own = torch.eye(length, dtype=torch.bool, device=query.device).repeat(1, len(self._keys) - 1)
        visible = torch.cat([ones.tril(), own], dim=1)  # [length, steps * length]
        return masked(query, torch.cat(self._keys, dim=1), torch.cat(self._values, dim=1), visible)
