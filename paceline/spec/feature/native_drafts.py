"""Whole EAGLE-3 drafts in one native call, for requests whose options ask for nothing but noise.

`Eagle3Proposer` grows a tree level by level and can honour every sampling option in between. Where there is nothing to
honour (greedy requests, and coupled sampling without truncation, whose noise is known beforehand), `NativeDrafts` gives
the same trees without coming back between levels.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.drafters.eagle3 import Eagle3
from paceline.models.drafters.paged import Layers, Linear, Placement
from paceline.ops.native.drafter import Drafting, NativeEagle, drafter_available
from paceline.spec.feature.draft_scores import DraftScores
from paceline.spec.feature.feature_queue import FeatureRows, IntArray
from paceline.spec.proposer import Budget


class NativeDrafts:
    def __init__(self, eagle: NativeEagle, scores: DraftScores, first_scratch: int) -> None:
        self._eagle, self._scores, self._first_scratch = eagle, scores, first_scratch

    @staticmethod
    def of(
        network: Any,
        target: Target,
        parts: tuple[Layers, Linear, Linear],  # its layer, fc and head
        place: Placement,
        scores: DraftScores,
        first_scratch: int,
    ) -> "NativeDrafts | None":
        """None where the network is another one, or the target or the drafter do not run natively."""
        is_native = target.handle is not None and place.is_native
        if not (isinstance(network, Eagle3) and is_native and drafter_available()):
            return None
        layers, fc, head = parts
        middle = network.midlayer
        eagle = NativeEagle(
            target,
            layers,  # type: ignore[arg-type]  # native ones, because of where they run
            fc,  # type: ignore[arg-type]
            head,  # type: ignore[arg-type]
            fc_norm=getattr(network.fc_norm, "weight", None),
            hidden_norm=middle.hidden_norm.weight,
            embedding_norm=middle.input_layernorm.weight,
            final_norm=network.norm.weight,
            target_ids=network.d2t,
            id_constants=scores.id_constants,
            eps=network.config.layer.rms_norm_eps,
            norm_before_residual=network.config.norm_before_residual,
        )
        return NativeDrafts(eagle, scores, first_scratch)

    def suit(self, request: Request) -> bool:
        return self._scores.is_plain(request) or self._scores.is_noise_only(request)

    def take_in(self, queued: FeatureRows, rows: slice) -> Tensor:
        """Fused features [rows, hidden] of some queued rows, their keys and values stored."""
        queued = queued.part(rows)
        hidden = queued.features if queued.features.dtype == torch.float32 else queued.features.float()
        return self._eagle.take_in(hidden, queued.next_tokens, queued.positions, queued.slots)

    def grow(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        contexts: Sequence[IntArray],  # slots of the requests' pairs
        features: Sequence[Tensor],  # of their newest ones
        widths: Sequence[int],
        lowest: float,
        followed: float,
    ) -> list[DraftTree]:
        calls = [self._call(*one) for one in zip(requests, budgets, contexts, features, widths, strict=True)]
        trees = []
        for drafted in self._eagle.draft(calls, self._first_scratch, lowest, followed):
            confidence = [math.exp(log_prob) for log_prob in drafted.log_probs]
            trees.append(
                DraftTree(drafted.token_ids, drafted.parents, confidence=confidence) if confidence else EMPTY_TREE
            )
        return trees

    def _call(self, request: Request, budget: Budget, context: IntArray, feature: Tensor, width: int) -> Drafting:
        size = (budget.num_nodes, budget.max_depth, width)
        if self._scores.is_plain(request):
            return Drafting(request.token_ids[-1], request.num_tokens - 2, context, feature, *size)
        keys = [self._scores.noise_key(request, depth) for depth in range(budget.max_depth)]
        noise = (1.0 / request.sampling_params.temperature, np.array(keys, dtype=np.uint64))
        return Drafting(request.token_ids[-1], request.num_tokens - 2, context, feature, *size, *noise)
