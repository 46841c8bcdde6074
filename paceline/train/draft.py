"""A draft model's recipe: a few of the target's own layers, distilled on the target's answers.

It sees tokens only, no hidden states. Forward KL against the target's distribution, at the same positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.models.drafters.distilled import Distilled, DistilledConfig
from paceline.models.drafters.layers import DecoderLayer
from paceline.train import attention
from paceline.train.corpus import Batch
from paceline.train.losses import soft_cross_entropy
from paceline.train.recipe import DraftVocabulary, LossOutput, shift_states
from paceline.train.target import DenseTarget, TargetPass


@dataclass(frozen=True, slots=True)
class DraftSettings:
    num_layers: int = 3
    variation_weight: float = 0.0  # of the total variation beside the cross-entropy
    prompt_weight: float = 0.1  # of positions inside the prompt: the target's opinion there is worth something too


class DraftRecipe:
    name = "draft"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, target: DenseTarget, vocabulary: DraftVocabulary, settings: DraftSettings) -> None:
        config = target.config
        num_layers = min(settings.num_layers, config.num_layers)
        self.target, self.settings = target, settings
        source = tuple(round(x) for x in torch.linspace(0, config.num_layers - 1, num_layers).tolist())
        layer = replace(config, num_layers=num_layers)
        self.network = Distilled(DistilledConfig(layer, len(vocabulary.ids), source)).to(target.device)
        self.network.d2t = vocabulary.ids
        self.vocabulary = vocabulary
        self._start_from_target(source)

    def calibrate(self, batch: Batch) -> None:
        """Nothing to scale: the layers start as the target's own."""

    def finish(self) -> None:
        """The network is in its final form all along."""

    @torch.no_grad()
    def _start_from_target(self, source: tuple[int, ...]) -> None:
        config = self.target.config
        self.network.lm_head.weight.copy_(self.vocabulary.head)
        self.network.lm_head.requires_grad_(False)
        self.network.norm.weight.copy_(self.target.decoder.final_norm)
        for mine, index in zip(self.network.layers, source, strict=True):
            assert isinstance(mine, DecoderLayer)
            theirs = self.target.decoder.layers[index]
            attn, mlp = mine.self_attn, mine.mlp
            sizes = [config.q_size, config.kv_size, config.kv_size]
            _copy_rows(theirs.qkv.plain, theirs.qkv.bias, sizes, attn.q_proj, attn.k_proj, attn.v_proj)
            _copy_rows(theirs.output.plain, theirs.output.bias, [config.hidden_size], attn.o_proj)
            wide = [config.intermediate_size] * 2
            _copy_rows(theirs.gate_up.plain, theirs.gate_up.bias, wide, mlp.gate_proj, mlp.up_proj)
            _copy_rows(theirs.down.plain, theirs.down.bias, [config.hidden_size], mlp.down_proj)
            for norm, weight in (
                (mine.input_layernorm, theirs.input_norm),
                (mine.post_attention_layernorm, theirs.mlp_norm),
                (attn.q_norm, theirs.q_norm),
                (attn.k_norm, theirs.k_norm),
            ):
                if weight is not None:
                    norm.weight.copy_(weight)  # type: ignore[operator]

    def loss(self, batch: Batch, target: TargetPass, step: int) -> LossOutput:
        states = self._states(batch)
        known = self.vocabulary.known[batch.shifted(1)]
        inside = torch.arange(1, 1 + batch.tokens.shape[1], device=known.device) < batch.lengths[:, None]
        answer = batch.is_answer(1)
        wanted = inside & known & (answer | (self.settings.prompt_weight > 0))
        sequence, position = wanted.nonzero(as_tuple=True)
        is_answer = answer[sequence, position]
        weights = torch.where(is_answer, 1.0, self.settings.prompt_weight)
        loss, agrees = soft_cross_entropy(
            states[sequence, position],
            self.network.lm_head.weight,
            target.normed[sequence, position],
            self.vocabulary.head,
            weights / weights.sum(),
            self.settings.variation_weight,
        )
        return LossOutput(loss, [(agrees & is_answer).float().sum() / is_answer.sum()])

    @property
    def head(self) -> Tensor:
        return self.network.lm_head.weight

    def draft_states(self, batch: Batch, target: TargetPass, num_tokens: int) -> Iterator[Tensor]:
        # With true tokens fed in, draft k after token t is the prediction made at position t + k.
        states = self._states(batch)
        for k in range(min(num_tokens, states.shape[1])):
            yield shift_states(states, -k)

    def _states(self, batch: Batch) -> Tensor:
        length = batch.tokens.shape[1]
        attends = [attention.causal] * len(self.network.layers)
        states: Tensor = self.network(
            self.target.embedding[batch.tokens], self.target.cos[:length], self.target.sin[:length], attends
        )
        return states

    def card(self) -> dict[str, Any]:
        return {
            "source_layers": list(self.network.config.source_layers),
            "draft_vocab_size": len(self.network.d2t),
        }


def _copy_rows(weight: Tensor, bias: Tensor | None, sizes: list[int], *linears: torch.nn.Linear) -> None:
    """Undo the decoder's stacking of matrices that share an input."""
    for linear, rows in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight.copy_(rows)
    if bias is not None:
        for linear, rows in zip(linears, torch.split(bias, sizes), strict=True):
            linear.bias.copy_(rows)
