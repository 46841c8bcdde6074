"""Which drafters draft whole trees on the device, and with which kernels."""

from typing import Any

import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.models.decoder import Decoder
from paceline.models.drafters.eagle import Eagle
from paceline.models.drafters.eagle3 import Eagle3
from paceline.models.drafters.joined import joined_weights
from paceline.models.drafters.paged import Layers, TorchLayers
from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.buckets import largest_bucket
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.captured_drafts import CapturedDrafts
from paceline.spec.feature.draft_levels import DraftKernels, DraftRoom, PlainDraft
from paceline.spec.feature.draft_scores import DraftScores
from paceline.spec.proposer import Budget

MAX_WIDTH = 16  # a level has W * W nodes, and all are compared with all


def device_drafts(
    network: Any,
    target: Target,
    layers: Layers,
    scores: DraftScores,
    services: EngineParts,
    largest: Budget,
    width: int,
) -> CapturedDrafts | None:
    """None where the network is another one or not on CUDA, where tokens are drawn from its probabilities, or where
    trees would be too wide: then drafts are made level by level."""
    is_eagle = isinstance(network, Eagle3 | Eagle)
    if not is_eagle or services.device.type != "cuda" or scores.sampling == "sampled":
        return None
    if min(largest.num_nodes, largest.max_depth) < 1 or not isinstance(layers, TorchLayers) or width > MAX_WIDTH:
        return None
    from paceline.spec.feature.fused_draft import FusedDraft  # Triton is there where CUDA is

    embedding = target_embedding(target)
    if embedding is None:
        return None
    weights = joined_weights(network, embedding, target.hidden_dtype, layers.angles)
    room = draft_room(layers, services, largest, width)
    return _captured(FusedDraft(weights, room), room, scores, services, weights.feature_size, target.hidden_dtype)


def plain_drafts(
    network: Eagle3 | Eagle,
    target: Decoder,
    layers: TorchLayers,
    scores: DraftScores,
    services: EngineParts,
    largest: Budget,
    width: int,
) -> CapturedDrafts:
    """The twin in plain PyTorch, on any device, in float32."""
    weights = joined_weights(network, target.embedding, torch.float32, layers.angles)
    room = draft_room(layers, services, largest, width)
    return _captured(PlainDraft(weights, room), room, scores, services, weights.feature_size, target.hidden_dtype)


def draft_room(layers: TorchLayers, services: EngineParts, largest: Budget, width: int) -> DraftRoom:
    return DraftRoom(
        kv=layers.kv_cache[0],
        first_scratch=services.num_slots,
        max_requests=largest_bucket(services.max_num_seqs),
        num_pairs=largest.max_depth + 1,
        width=width,
        num_levels=largest.max_depth,
        num_nodes=largest.num_nodes,
    )


def target_embedding(target: Target) -> Tensor | None:
    """The matrix itself, [vocab, hidden], under whatever runs the target; None where it is not at hand."""
    from paceline.models.fused_decoder import FusedDecoder

    while isinstance(target, PaddedDecoder | FusedDecoder):
        target = target.base
    return target.embedding if isinstance(target, Decoder) else None


def _captured(
    kernels: DraftKernels,
    room: DraftRoom,
    scores: DraftScores,
    services: EngineParts,
    feature_size: int,
    feature_dtype: torch.dtype,
) -> CapturedDrafts:
    return CapturedDrafts(
        kernels,
        room,
        scores,
        max_length=services.max_model_len,
        feature_size=feature_size,
        feature_dtype=feature_dtype,
    )
