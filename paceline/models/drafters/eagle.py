"""EAGLE-1 (and EAGLE-2, which has the same weights): one decoder layer that predicts the target's last hidden state.

The hidden state h_t, after the target's final norm, and the embedding of x_{t+1} are fused, fc([embedding; h_t]), and
go through one Llama layer. What comes out is meant to *be* h_{t+1}: the target's own head turns it into scores for
x_{t+2}, and the next draft step takes it in place of the true h_{t+1}. So there is no norm and no head to learn.

The layer has no norm before its attention, because the first one has none in published files; where a file brings one,
it is used. The pair (h_t, x_{t+1}) has rotary position t.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.models.drafters.layers import Attend, DecoderLayer


@dataclass(frozen=True, slots=True)
class EagleConfig:
    layer: ModelConfig  # geometry of the decoder layer; hidden_size is the target's
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]  # one id as in core/forward.py: the state after the target's final norm
    fc_bias: bool = True
    input_norm: bool = False  # the layer norms what its attention reads


class Eagle(nn.Module):
    d2t: Tensor  # [draft vocab] int64

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size = config.layer.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config.layer, config.input_norm)])
        # The target's rows, never trained and never stored.
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def midlayer(self) -> DecoderLayer:
        """EAGLE-3's name for the one layer."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def forward(self, embedding: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The next feature, an estimate of the target's normed state: [..., hidden]"""
        fused: Tensor = self.fc(torch.cat([embedding.to(feature.dtype), feature], dim=-1))
        output: Tensor = self.midlayer(fused, cos, sin, attend)
        return output

    def logits(self, feature: Tensor) -> Tensor:
        """Scores over the draft vocabulary: [..., draft vocab]"""
        scores: Tensor = self.lm_head(feature)
        return scores
