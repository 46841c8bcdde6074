"""One layer of a decoder over whole sequences, in plain PyTorch: what calibration runs, a layer at a time.

Only this layer's weights are needed, in float32, so a model of any depth passes through the memory of one layer. The
arithmetic is that of models/decoder.py, without a KV cache.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.models.rope import local_rope_tables, rope_tables
from paceline.ops.reference import rope

# What multiplies the same input -> its matrices. All weights of a layer are named without the layer's prefix.
INPUTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
LINEARS = tuple(name for names in INPUTS.values() for name in names)


class LayerPass:
    """Runs layers over `lengths` tokens of each sequence, which stand one after the other in [tokens, hidden]."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self._config, self._lengths = config, list(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        self._angles = _at(positions, rope_tables(config, max(lengths)))
        self._local = _at(positions, local_rope_tables(config, max(lengths)))

    def run(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor,  # [tokens, hidden] float32
        inputs: MutableMapping[str, Tensor] | None = None,  # takes what each of `INPUTS` multiplies: [tokens, in]
    ) -> Tensor:
        config, kept = self._config, {} if inputs is None else inputs
        kept["qkv"] = self._norm(hidden, weights["input_layernorm.weight"])
        kept["o"] = self._attention(layer, weights, kept["qkv"])
        given = _linear(kept["o"], weights, "self_attn.o_proj")
        if config.output_norms:
            given = self._norm(given, weights["post_attention_layernorm.weight"])
        hidden = hidden + given
        kept["gate_up"] = self._norm(hidden, weights[mlp_norm(config)])
        gate = _linear(kept["gate_up"], weights, "mlp.gate_proj")
        gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
        kept["down"] = gate * _linear(kept["gate_up"], weights, "mlp.up_proj")
        given = _linear(kept["down"], weights, "mlp.down_proj")
        if config.output_norms:
            given = self._norm(given, weights["post_feedforward_layernorm.weight"])
        return hidden + given

    def _attention(self, layer: int, weights: Mapping[str, Tensor], normed: Tensor) -> Tensor:
        config = self._config
        query, key, value = (
            _linear(normed, weights, name).view(len(normed), -1, config.head_dim) for name in INPUTS["qkv"]
        )
        if config.qk_norm:
            query = self._norm(query, weights["self_attn.q_norm.weight"])
            key = self._norm(key, weights["self_attn.k_norm.weight"])
        window = config.window(layer)
        if layer not in config.no_rope_layers:
            cos, sin = self._angles if window is None else self._local
            query, key = rope(query, cos, sin), rope(key, cos, sin)
        parts = (torch.split(x, self._lengths) for x in (query, key, value))
        mixed = [self._attend(q, k, v, window) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(mixed)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """One sequence. [tokens, heads, dim] each -> [tokens, heads * dim]"""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [heads, tokens, dim]
        ahead = torch.arange(len(query)) - torch.arange(len(query))[:, None]  # [row, column]: how far ahead the key is
        seen = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)
        scale = self._config.score_scale
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )
        return mixed[0].transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def mlp_norm(config: ModelConfig) -> str:
    """The norm whose output gate and up multiply."""
    return "pre_feedforward_layernorm.weight" if config.output_norms else "post_attention_layernorm.weight"


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _at(positions: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tables[0][positions], tables[1][positions]
