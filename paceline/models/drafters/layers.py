"""What drafter networks are made of: norms, a decoder layer, rotary embedding.

Training runs these layers over padded batches [sequences, positions, hidden]; the engine runs them over ragged rows
[rows, hidden] with a paged KV cache. Only attention differs between the two, so a layer is handed an `attend` function
and never asks where keys and values come from:

    attend(query, key, value) -> mixed      query [..., heads, head_dim], key and value [..., kv heads, head_dim]

Parameter names are those of published checkpoints, so a state dict is a checkpoint.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the norm comes out in float32; the stream keeps its own type.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self-attention whose input may be wider than the model (EAGLE-3 feeds it two vectors side by side)."""

    def __init__(self, config: ModelConfig, input_size: int | None = None) -> None:
        super().__init__()
        input_size = input_size or config.hidden_size
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, config.kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, config.kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., heads, head_dim], rotated"""
        return rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Each [..., kv heads, head_dim], the keys rotated"""
        key = rope(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return key, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        key, value = self.key_value(x, cos, sin)
        return self.output(attend(self.query(x, cos, sin), key, value))

    def output(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.o_proj(mixed.flatten(-2))
        return projected


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DecoderLayer(nn.Module):
    """The Llama layer. EAGLE-1 leaves out the first norm."""

    def __init__(self, config: ModelConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm: nn.Module = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, head_dim]; cos and sin: [..., head_dim / 2], one row per position."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
