"""Medusa's recipe: frozen target, heads only; head i learns the target's distribution at position t + 1 + i."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.models.drafters.medusa import Medusa, MedusaConfig
from paceline.train.corpus import Batch
from paceline.train.losses import soft_cross_entropy
from paceline.train.recipe import DraftVocabulary, LossOutput, shift_states
from paceline.train.target import DenseTarget, TargetPass


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    num_heads: int = 4
    num_layers: int = 2  # residual blocks per head
    head_decay: float = 0.8
    variation_weight: float = 0.0  # of the total variation beside the cross-entropy


class MedusaRecipe:
    name = "medusa"
    hidden_layers: tuple[int, ...] = ()  # TargetPass.normed is all it reads

    def __init__(self, target: DenseTarget, vocabulary: DraftVocabulary, settings: MedusaSettings) -> None:
        self.settings = settings
        config = MedusaConfig(
            target.config.hidden_size, len(vocabulary.ids), settings.num_heads, settings.num_layers, shared_head=True
        )
        self.network = Medusa(config).to(target.device)
        self.network.d2t = vocabulary.ids
        self.vocabulary = vocabulary
        with torch.no_grad():
            self.network.head(0).weight.copy_(self.vocabulary.head)
        self.network.heads.requires_grad_(False)

    def calibrate(self, batch: Batch) -> None:
        """Nothing to scale: the heads start as the target's own."""

    def finish(self) -> None:
        """The network is in its final form all along."""

    def loss(self, batch: Batch, target: TargetPass, step: int) -> LossOutput:
        decay = self.settings.head_decay
        output = LossOutput(target.normed.new_zeros((), dtype=torch.float32))
        for i, block in enumerate(self.network.blocks):
            # Row t is the last one with a hidden state, x_{t+1} is the last token, head i predicts x_{t+2+i}.
            wanted = batch.is_answer(1) & batch.is_answer(2 + i) & self.vocabulary.known[batch.shifted(2 + i)]
            sequence, position = wanted.nonzero(as_tuple=True)
            count = max(1, len(sequence))
            loss, agrees = soft_cross_entropy(
                block(target.normed[sequence, position]),
                self.network.head(i).weight,
                target.normed[sequence, position + 1 + i],
                self.vocabulary.head,
                torch.full((len(sequence),), 1.0 / count, device=wanted.device),
                self.settings.variation_weight,
            )
            output.loss = output.loss + decay**i * loss
            output.agreement.append(agrees.float().sum() / count)
        output.loss = output.loss / sum(decay**i for i in range(len(self.network.blocks)))
        return output

    @property
    def head(self) -> Tensor:
        return self.network.head(0).weight

    def draft_states(self, batch: Batch, target: TargetPass, num_tokens: int) -> Iterator[Tensor]:
        for features in self.network.features(target.normed)[:num_tokens]:
            yield shift_states(features, 1)

    def card(self) -> dict[str, Any]:
        return {"num_heads": self.settings.num_heads, "draft_vocab_size": len(self.network.d2t)}
