"""A small Llama that drafts for a large one: a few of the target's layers, distilled, under the target's own embedding.

The embedding is the target's and the head is the target's rows of a draft vocabulary; neither is trained nor stored. On
a small target the full vocabulary matrix would cost more than all of the drafter's layers together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.models.drafters.layers import Attend, DecoderLayer, RMSNorm


@dataclass(frozen=True, slots=True)
class DistilledConfig:
    layer: ModelConfig  # the target's config, with fewer layers
    draft_vocab_size: int
    source_layers: tuple[int, ...]  # of the target: where training started from


class Distilled(nn.Module):
    d2t: Tensor  # [draft vocab] int64

    def __init__(self, config: DistilledConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(layer.num_layers))
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    def forward(self, embedding: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        """[..., hidden] -> normed states [..., hidden]; one `attend` per layer"""
        x = embedding
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        output: Tensor = self.norm(x)
        return output
