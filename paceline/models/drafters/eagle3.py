"""EAGLE-3: one decoder layer that reads three of the target's hidden states.

Three hidden states of the target at position t are fused, g_t = fc([low; mid; high]). The layer's attention sees
cat(norm(embedding of x_{t+1}), norm(g_t)) and its residual stream is g_t, so that the output f_t is again a feature:
the next draft step feeds (f_t, x_{t+2}) in place of (g_{t+1}, x_{t+2}), which the target has not computed yet. A head
of its own gives scores over a draft vocabulary; `d2t` maps them to the target's ids.

The pair (g_t, x_{t+1}) has rotary position t.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.models.drafters.layers import Attend, Attention, Mlp, RMSNorm


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    layer: ModelConfig  # geometry of the decoder layer; vocab_size is the target's
    target_hidden_size: int
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]  # ids as in core/forward.py: the residual stream entering these layers
    norm_before_residual: bool = False  # the residual stream starts from norm(g) instead of g
    norm_before_fc: bool = False


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(layer, input_size=2 * layer.hidden_size)
        self.mlp = Mlp(layer)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.input_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, embedding: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        both = torch.cat([self.input_layernorm(embedding).to(normed.dtype), normed], dim=-1)
        x = residual + self.self_attn(both, cos, sin, attend)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Eagle3(nn.Module):
    d2t: Tensor  # [draft vocab] int64: target id of each draft id (absolute, unlike in published files)

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        fused = len(config.hidden_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, layer.hidden_size, bias=False)
        self.fc_norm: nn.Module = RMSNorm(fused, layer.rms_norm_eps) if config.norm_before_fc else nn.Identity()
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """g from the target's hidden states: [..., layers, target hidden] -> [..., hidden]"""
        fused: Tensor = self.fc(self.fc_norm(features.flatten(-2)))
        return fused

    def forward(self, embedding: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The next feature, before the final norm: [..., hidden]"""
        output: Tensor = self.midlayer(embedding, feature, cos, sin, attend)
        return output

    def logits(self, feature: Tensor) -> Tensor:
        """Scores over the draft vocabulary: [..., draft vocab]"""
        scores: Tensor = self.lm_head(self.norm(feature))
        return scores
