"""DFlash: a whole block of draft tokens filled in at once.

The context is the target's own hidden states: several layers of each position, fused and normed. The block is the last
token's embedding followed by masks. In every layer the block's queries look at the context (positions before the block)
and, in both directions, at the block itself; the context is never updated, so its keys and values are computed once and
kept. Position k >= 1 of the block predicts the token there, through the target's head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.models.drafters.layers import Attend, DecoderLayer, RMSNorm


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    layer: ModelConfig  # geometry of the layers and how many; vocab_size is the target's
    target_hidden_size: int
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]  # ids as in core/forward.py (published files count layer outputs: one less)
    block_size: int  # the last token and block_size - 1 drafts
    mask_token_id: int


class DFlash(nn.Module):
    d2t: Tensor  # [draft vocab] int64

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        fused = len(config.hidden_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, layer.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(layer.num_layers))
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        # The target's rows, never trained and never stored.
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    def context(self, features: Tensor) -> Tensor:
        """[..., layers, target hidden] -> [..., hidden]"""
        fused: Tensor = self.hidden_norm(self.fc(features.flatten(-2)))
        return fused

    def context_key_value(self, context: Tensor, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer for context rows: each [..., kv heads, head_dim]"""
        return [layer.self_attn.key_value(context, cos, sin) for layer in self.decoder_layers()]

    def forward(self, block: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        """block: embeddings [..., hidden]; one `attend` per layer, which adds the context. Returns normed states."""
        x = block
        for layer, attend in zip(self.decoder_layers(), attends, strict=True):
            x = layer(x, cos, sin, attend)
        output: Tensor = self.norm(x)
        return output

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
