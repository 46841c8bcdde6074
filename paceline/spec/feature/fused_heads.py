"""Medusa's vocabulary matrices on the Triton kernels of EAGLE's head (ops/triton/draft_top.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.ops.triton.draft_top import head_top, num_stretches
from paceline.ops.triton.product_tree import product_trees
from paceline.spec.feature.draft_buffers import head_rows, head_tile
from paceline.spec.round_draft import WalkNoise


class FusedHeads:
    def __init__(self, heads: Sequence[Tensor], target_ids: Tensor, max_requests: int, width: int) -> None:
        self._heads, self._target_ids = heads, target_ids
        self._tile = head_tile(heads[0])
        num_parts = max_requests * num_stretches(len(target_ids), self._tile)
        self._packed = torch.empty(num_parts * width, dtype=torch.int64, device=target_ids.device)
        self._sums = torch.empty(num_parts, device=target_ids.device)

    def top(self, head: int, features: Tensor, noise: WalkNoise, ids: Tensor, log_probs: Tensor) -> None:
        head_top(
            features, self._heads[head], noise, head, self._target_ids, self._packed, self._sums, ids, log_probs,
            0.0, self._tile, row_tile=head_rows(len(features)),
        )  # fmt: skip

    def trees(
        self, ids: Tensor, log_probs: Tensor, flags: Tensor, trees: Tensor, num_nodes: int, depth: int, lowest: float
    ) -> None:
        product_trees(ids, log_probs, flags, trees, num_nodes, depth, lowest)
