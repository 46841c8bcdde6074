"""The frozen target over padded batches: hidden features for drafters, and the teacher they learn from.

The engine's decoder works on ragged rows and a paged cache, which is right for serving and slow for training. Here the
same weights run over [sequences, positions] with plain causal attention. Padding is on the right, where causal
attention never looks, so no mask is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.models.decoder import Decoder, Layer
from paceline.models.drafters.layers import rope
from paceline.models.rope import rope_tables


@dataclass(frozen=True, slots=True)
class TargetPass:
    features: Tensor  # [sequences, positions, len(hidden_layers), hidden]
    normed: Tensor  # [sequences, positions, hidden]: after the final norm, what the head multiplies


class DenseCache:
    """Keys and values of a padded batch, for writing answers token by token."""

    def __init__(self, target: "DenseTarget", num_sequences: int, length: int) -> None:
        config = target.config
        shape = (config.num_layers, 2, num_sequences, config.num_kv_heads, length, config.head_dim)
        self.keys_values = torch.zeros(shape, dtype=target.dtype, device=target.device)


class DenseTarget:
    def __init__(self, decoder: Decoder) -> None:
        if decoder.config.sliding_window is not None:
            raise InvalidOptionError(
                "training for a target with sliding-window attention is not supported: its drafter would learn from "
                "features that the engine never shows it. Choose a target without a window."
            )
        if decoder.config.special_parts:
            parts = ", ".join(sorted(decoder.config.special_parts))
            raise InvalidOptionError(f"training for a target with {parts} is not supported. Choose another target.")
        self.decoder = decoder
        self.config = decoder.config
        self.dtype, self.device = decoder.dtype, decoder.device
        cos, sin = rope_tables(decoder.config)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, head_dim / 2]

    @property
    def embedding(self) -> Tensor:
        return self.decoder.embedding  # [vocab, hidden]

    @property
    def head(self) -> Tensor:
        return self.decoder.head.plain  # [vocab, hidden]

    @torch.no_grad()
    def forward(self, tokens: Tensor, hidden_layers: Sequence[int] = ()) -> TargetPass:
        """tokens: [sequences, positions]. Layer ids as in core/forward.py."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        hidden = self.embedding[tokens]
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(self.decoder.layers):
            if i in hidden_layers:
                kept[i] = hidden
            query, key, value = self._project(layer, hidden, cos, sin)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            hidden = self._finish_layer(layer, hidden, mixed)
        normed = self._norm(hidden, self.decoder.final_norm)
        kept[self.config.num_layers], kept[self.config.num_layers + 1] = hidden, normed
        wanted = [kept[i] for i in hidden_layers]
        features = torch.stack(wanted, dim=2) if wanted else hidden.new_empty(*tokens.shape, 0, hidden.shape[-1])
        return TargetPass(features, normed)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: DenseCache, first: int) -> None:
        """Write keys and values of whole prompts [sequences, positions] into rows first, first + 1, ..."""
        count, length = tokens.shape
        hidden = self.embedding[tokens]
        for i, layer in enumerate(self.decoder.layers):
            query, key, value = self._project(layer, hidden, self.cos[:length], self.sin[:length])
            cache.keys_values[i, 0, first : first + count, :, :length] = key
            cache.keys_values[i, 1, first : first + count, :, :length] = value
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            hidden = self._finish_layer(layer, hidden, mixed)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: DenseCache, length: int) -> Tensor:
        """One token per sequence at its own position; looks at cache slots [0, length). Returns logits float32."""
        count = tokens.shape[0]
        groups = self.config.num_kv_heads
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [sequences, 1, head_dim / 2]
        rows = torch.arange(count, device=self.device)
        visible = torch.arange(length, device=self.device) <= positions[:, None]  # [sequences, length]
        hidden = self.embedding[tokens][:, None]  # [sequences, 1, hidden]
        for i, layer in enumerate(self.decoder.layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            keys, values = cache.keys_values[i]
            keys[rows, :, positions] = key[:, :, 0]
            values[rows, :, positions] = value[:, :, 0]
            # Query heads that share a key head stand in for query positions: keys are never copied per head.
            grouped = query.view(count, groups, -1, self.config.head_dim)
            mask = visible[:, None, None].expand(-1, 1, grouped.shape[2], -1)
            mixed = F.scaled_dot_product_attention(grouped, keys[:, :, :length], values[:, :, :length], attn_mask=mask)
            hidden = self._finish_layer(layer, hidden, mixed.reshape(count, -1, 1, self.config.head_dim))
        normed = self._norm(hidden[:, 0], self.decoder.final_norm)
        return F.linear(normed, self.head).float()

    def _project(self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [sequences, heads, positions, head_dim]"""
        config = self.config
        normed = self._norm(hidden, layer.input_norm)
        qkv = F.linear(normed, layer.qkv.plain, layer.qkv.bias)
        qkv = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(qkv, heads, dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        query, key = rope(query, cos, sin), rope(key, cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _finish_layer(self, layer: Layer, hidden: Tensor, mixed: Tensor) -> Tensor:
        output = F.linear(mixed.transpose(1, 2).flatten(2), layer.output.plain, layer.output.bias)
        hidden = hidden + output
        gate_up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up.plain, layer.gate_up.bias)
        gate, up = gate_up.chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, layer.down.plain, layer.down.bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
