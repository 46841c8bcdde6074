"""DFlash's recipe: random anchors, one block of masks behind each, all blocks of a sequence in one pass.

The block behind anchor a (the last token) sits at positions a, a+1, ...; it may look at the context features of
positions before a and at itself, in both directions. Early positions of a block matter more, since a draft counts only
if those before it were right: weights exp(-(k-1)/gamma).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.models.drafters.dflash import DFlash, DFlashConfig
from paceline.models.drafters.layers import Attend
from paceline.train import attention
from paceline.train.corpus import Batch
from paceline.train.losses import soft_cross_entropy
from paceline.train.recipe import DraftVocabulary, FusionScale, LossOutput
from paceline.train.target import DenseTarget, TargetPass

EVAL_ANCHORS = 32  # blocks drafted together where every position of a sequence is an anchor


@dataclass(frozen=True, slots=True)
class DFlashSettings:
    num_layers: int = 2
    num_features: int = 5  # target layers that the context is made of
    intermediate_size: int | None = None  # of the drafter's MLPs; None: the target's
    block_size: int = 8
    gamma: float = 4.0
    anchors_per_token: float = 0.25  # blocks per answer token
    mask_token_id: int = 0
    seed: int = 0
    variation_weight: float = 0.0  # of the total variation beside the cross-entropy


class DFlashRecipe:
    name = "dflash"

    def __init__(self, target: DenseTarget, vocabulary: DraftVocabulary, settings: DFlashSettings) -> None:
        config = target.config
        self.target, self.settings = target, settings
        # Evenly spread, from the output of layer 1 to that of layer N - 3.
        spread = torch.linspace(min(2, config.num_layers), max(1, config.num_layers - 2), settings.num_features)
        self.hidden_layers: tuple[int, ...] = tuple(sorted({round(x) for x in spread.tolist()}))
        layer = replace(
            config,
            num_layers=settings.num_layers,
            intermediate_size=settings.intermediate_size or config.intermediate_size,
            qk_norm=True,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
        )
        self.network = DFlash(
            DFlashConfig(
                layer,
                config.hidden_size,
                len(vocabulary.ids),
                self.hidden_layers,
                settings.block_size,
                settings.mask_token_id,
            )
        ).to(target.device)
        self.network.d2t = vocabulary.ids
        self.vocabulary = vocabulary
        self.scale = FusionScale(self.network.fc, target, self.hidden_layers)
        with torch.no_grad():
            self.network.lm_head.weight.copy_(self.vocabulary.head)
        self.network.lm_head.requires_grad_(False)

    def calibrate(self, batch: Batch) -> None:
        self.scale.calibrate(batch)

    def finish(self) -> None:
        self.scale.fold()

    def loss(self, batch: Batch, target: TargetPass, step: int) -> LossOutput:
        settings = self.settings
        anchors = self._sample_anchors(batch, step)  # [sequences, blocks]
        states = self._blocks(batch, self._context(target), anchors)  # [sequences, blocks, block size, hidden]
        offsets = torch.arange(1, settings.block_size, device=anchors.device)
        positions = anchors[:, :, None] + offsets  # [sequences, blocks, block size - 1]: where drafts go
        inside = (positions < batch.lengths[:, None, None]) & (
            anchors[:, :, None] >= batch.prompt_lengths[:, None, None]
        )
        clamped = positions.clamp(max=batch.tokens.shape[1] - 1)
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None, None]
        wanted = inside & self.vocabulary.known[batch.tokens[rows, clamped]]
        sequence, block, k = wanted.nonzero(as_tuple=True)
        decay = torch.exp(-k / settings.gamma)
        loss, agrees = soft_cross_entropy(
            states[sequence, block, k + 1],
            self.network.lm_head.weight,
            target.normed[sequence, clamped[sequence, block, k] - 1],
            self.vocabulary.head,
            decay / decay.sum().clamp(min=1e-6),
            settings.variation_weight,
        )
        hits = torch.zeros(settings.block_size - 1, device=k.device).index_add_(0, k, agrees.float())
        counts = torch.bincount(k, minlength=settings.block_size - 1).clamp(min=1)
        return LossOutput(loss, list(hits / counts))

    @property
    def head(self) -> Tensor:
        return self.network.lm_head.weight

    def draft_states(self, batch: Batch, target: TargetPass, num_tokens: int) -> Iterator[Tensor]:
        length = batch.tokens.shape[1]
        count = min(num_tokens, self.settings.block_size - 1)
        context = self._context(target)
        all_states = target.normed.new_zeros(*batch.tokens.shape, count, target.normed.shape[-1])
        for begin in range(0, length, EVAL_ANCHORS):
            anchors = torch.arange(begin, min(length, begin + EVAL_ANCHORS), device=batch.tokens.device)
            if not bool(batch.is_answer()[:, anchors].any()):
                continue
            states = self._blocks(batch, context, anchors.expand(len(batch.tokens), -1))[:, :, 1 : 1 + count]
            all_states[:, anchors] = states.to(all_states.dtype)
        yield from all_states.unbind(2)

    def _context(self, target: TargetPass) -> list[tuple[Tensor, Tensor]]:
        length = target.features.shape[1]
        context = self.network.context(self.scale(target.features))
        return self.network.context_key_value(context, self.target.cos[:length], self.target.sin[:length])

    def _blocks(self, batch: Batch, context: list[tuple[Tensor, Tensor]], anchors: Tensor) -> Tensor:
        """Normed states of the blocks behind `anchors` [sequences, blocks]: [sequences, blocks, block size, hidden]"""
        num_sequences, num_blocks = anchors.shape
        size, length = self.settings.block_size, batch.tokens.shape[1]
        tokens = torch.full((num_sequences, num_blocks, size), self.settings.mask_token_id, device=anchors.device)
        tokens[:, :, 0] = batch.tokens.gather(1, anchors)
        positions = (anchors[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)
        before = torch.arange(length, device=anchors.device) < anchors[:, :, None]  # [sequences, blocks, length]
        block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(size)
        same_block = (block[:, None] == block).expand(num_sequences, -1, -1)
        visible = torch.cat([before.repeat_interleave(size, dim=1), same_block], dim=2)[:, None]
        attends = [_with_context(key, value, visible) for key, value in context]
        states: Tensor = self.network(
            self.target.embedding[tokens.flatten(1)], self.target.cos[positions], self.target.sin[positions], attends
        )
        return states.view(num_sequences, num_blocks, size, -1)

    def _sample_anchors(self, batch: Batch, step: int) -> Tensor:
        """[sequences, blocks]: random answer positions with something after them, different at every step."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)
        longest = int((batch.lengths - batch.prompt_lengths).max())
        num_blocks = max(1, math.ceil(longest * self.settings.anchors_per_token))
        chance = torch.rand(len(batch.tokens), num_blocks, generator=generator).to(batch.tokens.device)
        room = (batch.lengths - 1 - batch.prompt_lengths).clamp(min=1)
        return batch.prompt_lengths[:, None].clamp(max=batch.tokens.shape[1] - 1) + (chance * room[:, None]).long()

    def card(self) -> dict[str, Any]:
        return {
            "hidden_layers": list(self.hidden_layers),
            "block_size": self.settings.block_size,
            "draft_vocab_size": len(self.network.d2t),
        }


def _with_context(context_key: Tensor, context_value: Tensor, visible: Tensor) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat([context_key, key], dim=1), torch.cat([context_value, value], dim=1)
        return attention.masked(query, keys, values, visible)

    return attend
