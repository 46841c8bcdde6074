"""Medusa's part of rounds on the device: the heads on the newest accepted row of each request, and the likeliest
combinations of their guesses.

Nothing is kept of a request but how its noise is scaled. The blocks of all heads are one product.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.request import Request
from paceline.models.drafters.medusa import Medusa
from paceline.models.sent_ints import SentInts
from paceline.ops.rounds import RoundState
from paceline.spec.feature.draft_levels import plain_top
from paceline.spec.feature.draft_scores import LOWEST, DraftScores
from paceline.spec.feature.product_trees import product_trees
from paceline.spec.round_draft import RoundRoom, Walked, WalkedRoom, WalkNoise
from paceline.spec.rounds import RoundSize


class Heads(Protocol):
    """The vocabulary matrices, and what is made of their guesses."""

    def top(self, head: int, features: Tensor, noise: WalkNoise, ids: Tensor, log_probs: Tensor) -> None:
        """features [R, hidden] -> the target's ids and their log-probabilities, [R, W]: written, likeliest first."""
        ...

    def trees(
        self, ids: Tensor, log_probs: Tensor, flags: Tensor, trees: Tensor, num_nodes: int, depth: int, lowest: float
    ) -> None:
        """As product_trees.py."""
        ...


class PlainHeads:
    """In plain PyTorch, on any device."""

    def __init__(self, heads: Sequence[Tensor], target_ids: Tensor) -> None:
        self._heads, self._target_ids = heads, target_ids

    def top(self, head: int, features: Tensor, noise: WalkNoise, ids: Tensor, log_probs: Tensor) -> None:
        logits = F.linear(features, self._heads[head].float())
        best, found = plain_top(logits[:, None], noise, head, ids.shape[1])
        ids.copy_(self._target_ids[best[:, 0]])
        log_probs.copy_(found[:, 0])

    def trees(
        self, ids: Tensor, log_probs: Tensor, flags: Tensor, trees: Tensor, num_nodes: int, depth: int, lowest: float
    ) -> None:
        product_trees(ids, log_probs, flags, trees, num_nodes, depth, lowest)


class MedusaRoundDraft:
    def __init__(
        self,
        network: Medusa,
        hidden_layer: int,
        scores: DraftScores,
        room: RoundRoom,
        width: int,
        lowest: float,  # log-probability from which a path is kept
        device: torch.device,
        dtype: torch.dtype,  # of the weights
    ) -> None:
        self.room, self.hidden_layers = room, (hidden_layer,)
        self._scores, self._lowest = scores, max(LOWEST / 2, lowest)
        weights = network.to(device)  # as the proposer has it: only what is of another dtype is copied
        count = min(room.num_levels, len(weights.blocks))
        blocks = [weights.residual_blocks(i) for i in range(count)]
        self._blocks = [  # of each layer: [heads, hidden, hidden] and [heads, 1, hidden]
            (
                torch.stack([block.linear.weight.detach().t() for block in layer]).to(dtype),
                torch.stack([block.linear.bias.detach() for block in layer])[:, None].to(dtype),
            )
            for layer in zip(*blocks, strict=True)
        ]
        matrices = [
            weights.head(i).weight.detach().to(dtype) for i in range(1 if weights.config.shared_head else count)
        ]
        heads = matrices * count if weights.config.shared_head else matrices
        target_ids = network.d2t.to(device).int()
        self._heads = _heads(heads, target_ids, room.max_requests, width, device)
        self._walked = WalkedRoom(room, device, scores.id_constants)
        self._scales = SentInts(room.max_requests, device)
        shape = (count, room.max_requests, width)
        self._ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(shape, device=device)
        self._trees = torch.zeros(room.max_requests, 1 + 3 * room.num_nodes, dtype=torch.int32, device=device)

    def begin(self, size: RoundSize, requests: Sequence[Request]) -> bool:
        scores = self._scores
        if not all(scores.is_plain(request) or scores.is_noise_only(request) for request in requests):
            return False
        host = self._scales.hosts[self._scales.free()].view(torch.float32)
        host.zero_()
        for i, request in enumerate(requests):
            host[i] = 0.0 if scores.is_plain(request) else 1.0 / request.sampling_params.temperature
        self._scales.send()
        self._walked.begin(self._scales.device_ints.view(torch.float32))
        return True

    def walked(self, size: RoundSize) -> Walked:
        return self._walked.walked(size.num_requests)

    @torch.no_grad()
    def draft(self, size: RoundSize, state: RoundState, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        count, budget = size.num_requests, size.budget
        depth = min(budget.max_depth, len(self._ids))
        newest = self.walked(size).hidden_rows.view(count, -1)[:, -1].contiguous()
        features = torch.index_select(hidden[:, 0], 0, newest).float().expand(depth, -1, -1)  # [heads, R, hidden]
        for weight, bias in self._blocks:
            made = torch.baddbmm(bias[:depth], features.to(weight.dtype), weight[:depth])
            features = features + F.silu(made.float())
        ids, log_probs = self._ids[:depth, :count], self._log_probs[:depth, :count]
        for head in range(depth):
            self._heads.top(head, features[head], self._walked.noise(count), ids[head], log_probs[head])
        trees = self._trees[:count]
        flags = state.flags[:count]
        self._heads.trees(ids, log_probs, flags, trees, budget.num_nodes, budget.max_depth, self._lowest)
        return trees


def _heads(heads: Sequence[Tensor], target_ids: Tensor, max_requests: int, width: int, device: torch.device) -> Heads:
    if device.type != "cuda":
        return PlainHeads(heads, target_ids)
    from paceline.spec.feature.fused_heads import FusedHeads  # Triton is there where CUDA is

    return FusedHeads(heads, target_ids, max_requests, width)
