"""EAGLE-3's recipe: training-time test.

While drafting, the drafter is fed its own features; trained only on the target's, it would be wrong after one step.
So every anchor is unrolled for several steps in training too, each fed with the feature of the step before and the
true next token, and later steps weigh less (`step_decay`). The loss is the cross-entropy against the target's
distribution over the draft vocabulary. Where the true token is outside of that vocabulary there is nothing to learn.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.train.corpus import Batch
from paceline.train.losses import soft_cross_entropy
from paceline.train.recipe import DraftVocabulary, FusionScale, LossOutput, shift_states
from paceline.train.target import DenseTarget, TargetPass
from paceline.train.unroll import unroll


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    num_steps: int = 5  # of training-time test
    step_decay: float = 0.8
    intermediate_size: int | None = None  # of the drafter's MLP; None: the target's
    train_head: bool = True
    variation_weight: float = 0.0  # of the total variation beside the cross-entropy


class Eagle3Recipe:
    name = "eagle3"

    def __init__(self, target: DenseTarget, vocabulary: DraftVocabulary, settings: Eagle3Settings) -> None:
        config = target.config
        n = config.num_layers
        self.target, self.settings = target, settings
        self.hidden_layers: tuple[int, ...] = (min(2, n), n // 2, max(0, n - 3))
        layer = replace(
            config,
            num_layers=1,
            intermediate_size=settings.intermediate_size or config.intermediate_size,
            qk_norm=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
        )
        self.network = Eagle3(Eagle3Config(layer, config.hidden_size, len(vocabulary.ids), self.hidden_layers))
        self.network.to(target.device)
        self.network.d2t = vocabulary.ids
        self.vocabulary = vocabulary
        self.scale = FusionScale(self.network.fc, target, self.hidden_layers)
        with torch.no_grad():
            self.network.lm_head.weight.copy_(self.vocabulary.head)
        self.network.lm_head.weight.requires_grad_(settings.train_head)

    def calibrate(self, batch: Batch) -> None:
        self.scale.calibrate(batch)

    def finish(self) -> None:
        self.scale.fold()

    def loss(self, batch: Batch, target: TargetPass, step: int) -> LossOutput:
        decay = self.settings.step_decay
        total = target.normed.new_zeros((), dtype=torch.float32)
        output = LossOutput(total)
        anchors = batch.is_answer(1)  # the last token is part of the answer, as it is whenever the engine drafts
        for i, feature in enumerate(self._unroll(batch, target, self.settings.num_steps)):
            # The pair (g_t, x_{t+1}) of step i predicts x_{t+2+i}; its teacher is the target at t + 1 + i.
            wanted = anchors & batch.is_answer(2 + i) & self.vocabulary.known[batch.shifted(2 + i)]
            sequence, position = wanted.nonzero(as_tuple=True)
            count = max(1, len(sequence))
            weights = torch.full((len(sequence),), 1.0 / count, device=feature.device)
            loss, agrees = soft_cross_entropy(
                self.network.norm(feature[sequence, position]),
                self.network.lm_head.weight,
                target.normed[sequence, position + 1 + i],
                self.vocabulary.head,
                weights,
                self.settings.variation_weight,
            )
            total = total + decay**i * loss
            output.agreement.append(agrees.float().sum() / count)
        output.loss = total / sum(decay**i for i in range(self.settings.num_steps))
        return output

    @property
    def head(self) -> Tensor:
        return self.network.lm_head.weight

    def draft_states(self, batch: Batch, target: TargetPass, num_tokens: int) -> Iterator[Tensor]:
        for feature in self._unroll(batch, target, num_tokens):
            yield shift_states(self.network.norm(feature), 1)

    def _unroll(self, batch: Batch, target: TargetPass, num_steps: int) -> Iterator[Tensor]:
        """The feature that comes out of every step, for every anchor: each [sequences, positions, hidden]"""
        fused = self.network.fuse(self.scale(target.features))
        return unroll(self.network, self.target, batch, fused, num_steps)

    def card(self) -> dict[str, Any]:
        return {"hidden_layers": list(self.hidden_layers), "draft_vocab_size": len(self.network.d2t)}
