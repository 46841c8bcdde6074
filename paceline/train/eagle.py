"""EAGLE-1's recipe: the drafter regresses the target's next hidden state, and a little on what the head makes of it.

The loss is smooth-L1 between the drafter's feature and the target's own (after its final norm), plus a small share of
the cross-entropy between what the target's head makes of either: features that are near but score differently are
worse than features that are far but score alike. While drafting the drafter reads features that are slightly wrong,
its own; in training uniform noise on the true ones stands for that. With `num_steps` above 1 it is fed its own
features in training too, as HASS and EAGLE-3 do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.drafters.eagle import Eagle, EagleConfig
from paceline.train.corpus import Batch
from paceline.train.losses import soft_cross_entropy
from paceline.train.recipe import DraftVocabulary, LossOutput, shift_states
from paceline.train.target import DenseTarget, TargetPass
from paceline.train.unroll import unroll


@dataclass(frozen=True, slots=True)
class EagleSettings:
    num_steps: int = 1  # 1: EAGLE-1; more: the drafter is fed its own features
    step_decay: float = 0.8
    feature_weight: float = 1.0  # of smooth-L1 on features
    token_weight: float = 0.1  # of the cross-entropy
    noise: float = 0.2  # width of the uniform noise on true features
    intermediate_size: int | None = None  # of the drafter's MLP; None: the target's
    seed: int = 0  # of the noise


class EagleRecipe:
    name = "eagle"
    hidden_layers: tuple[int, ...] = ()  # TargetPass.normed is all it reads

    def __init__(self, target: DenseTarget, vocabulary: DraftVocabulary, settings: EagleSettings) -> None:
        self.target, self.vocabulary, self.settings = target, vocabulary, settings
        layer = replace(
            target.config,
            num_layers=1,
            intermediate_size=settings.intermediate_size or target.config.intermediate_size,
            qk_norm=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
        )
        after_norm = target.config.num_layers + 1
        self.network = Eagle(EagleConfig(layer, len(vocabulary.ids), (after_norm,))).to(target.device)
        self.network.d2t = vocabulary.ids
        with torch.no_grad():
            self.network.lm_head.weight.copy_(vocabulary.head)
        self.network.lm_head.requires_grad_(False)

    def calibrate(self, batch: Batch) -> None:
        """Nothing to scale: what goes in has the size of what must come out."""

    def finish(self) -> None:
        """The network is in its final form all along."""

    def loss(self, batch: Batch, target: TargetPass, step: int) -> LossOutput:
        settings = self.settings
        output = LossOutput(target.normed.new_zeros((), dtype=torch.float32))
        anchors = batch.is_answer(1)  # the last token is part of the answer, as it is whenever the engine drafts
        features = unroll(self.network, self.target, batch, self._noisy(target.normed, step), settings.num_steps)
        for i, feature in enumerate(features):
            # The pair (h_t, x_{t+1}) of step i stands for h_{t+1+i}, which scores x_{t+2+i}.
            sequence, position = (anchors & batch.is_answer(2 + i)).nonzero(as_tuple=True)
            found, wanted = feature[sequence, position], target.normed[sequence, position + 1 + i]
            count = max(1, len(sequence))
            known = self.vocabulary.known[batch.shifted(2 + i)[sequence, position]]
            regression = F.smooth_l1_loss(found.float(), wanted.float(), reduction="sum") / (count * found.shape[-1])
            tokens, agrees = soft_cross_entropy(found, self.head, wanted, self.vocabulary.head, known / count)
            loss = settings.feature_weight * regression + settings.token_weight * tokens
            output.loss = output.loss + settings.step_decay**i * loss
            output.agreement.append((agrees & known).float().sum() / count)
        output.loss = output.loss / sum(settings.step_decay**i for i in range(settings.num_steps))
        return output

    @property
    def head(self) -> Tensor:
        return self.network.lm_head.weight

    def draft_states(self, batch: Batch, target: TargetPass, num_tokens: int) -> Iterator[Tensor]:
        for feature in unroll(self.network, self.target, batch, target.normed, num_tokens):
            yield shift_states(feature, 1)

    def card(self) -> dict[str, Any]:
        return {"draft_vocab_size": len(self.network.d2t)}

    def _noisy(self, normed: Tensor, step: int) -> Tensor:
        generator = torch.Generator(normed.device).manual_seed(self.settings.seed * 1_000_003 + step)
        noise = torch.rand(normed.shape, generator=generator, device=normed.device) - 0.5
        return normed + (self.settings.noise * noise).to(normed.dtype)
