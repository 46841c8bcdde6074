"""One decoder for the Llama family, in PyTorch, on CPU and CUDA.

Llama, Mistral, Qwen2/2.5, Qwen3, Gemma 3, Phi-3 and SmolLM3: what sets them apart is small and lives in `ModelConfig`:
biases, norms, a sliding window, rotary bases, an activation, a tied head. Weights that multiply the same input are
fused (q, k, v; gate and up), so a layer is four products. The keys and values of a pass are written to the paged cache
first and read from there, so a prompt chunk, one decode row and the nodes of a draft tree are all the same case.

>>> output = decoder.forward(batch, kv_cache)
>>> output.logits.shape  # [len(batch.logits_rows), vocab]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, Weights
from paceline.errors import InvalidOptionError, ModelLoadError
from paceline.models.dequantize import dequantize
from paceline.models.layout import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from paceline.models.quantized.grouped import packed_weight
from paceline.models.rope import local_rope_tables, rope_tables
from paceline.ops import reference
from paceline.ops.alignment import aligned
from paceline.ops.kernels import kernels_for
from paceline.ops.packed import PackedWeight, Weight, num_bytes


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Weight  # [out, in]; packed for the fused kernels on CUDA only
    bias: Tensor | None  # [out]

    @property
    def plain(self) -> Tensor:
        """Of a model that was not packed."""
        assert isinstance(self.weight, Tensor)
        return self.weight


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor  # [hidden]
    qkv: Linear  # [q_size + 2 * kv_size, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # [hidden, q_size]
    output_norm: Tensor | None  # [hidden], on what attention gives back
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]
    mlp_output_norm: Tensor | None  # [hidden], on what the MLP gives back


class Decoder:
    num_threads = None  # PyTorch's
    draws_tokens = False
    handle = None  # nothing native

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype = torch.float32,  # of all but a KV cache for which kv_dtype says otherwise
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
        packs: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`packs`: quantized matrices become those of the fused kernels (ops/packed.py); else they are widened."""
        self.config = config
        self.dtype, self.hidden_dtype = kv_dtype or dtype, dtype
        self.device = torch.device(device)
        self.batch_invariant = batch_invariant
        self._kernels = kernels_for(self.device, batch_invariant)
        self._weights, self._packs = weights, packs
        self.embedding = self._tensor(EMBEDDING)  # [vocab, hidden]
        self.layers = [self._layer(i) for i in range(config.num_layers)]
        self.final_norm = self._tensor(FINAL_NORM)  # [hidden]
        self.head = Linear(self._head(), None)
        del self._weights  # converted copies are all we need
        cos, sin = rope_tables(config)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, head_dim / 2]
        local = None if config.local_rope_theta is None else local_rope_tables(config)
        self._local = None if local is None else (local[0].to(self.device), local[1].to(self.device))

    @property
    def weight_bytes(self) -> int:
        """What a pass reads, but for the rows of its tokens."""
        linears = [x for layer in self.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(num_bytes(linear.weight) for linear in (*linears, self.head))

    def fold_norms(self) -> None:
        """Put the gains of each layer's norms into the products behind them: the same numbers up to rounding. Those
        behind which the weight is packed stay."""
        for i, layer in enumerate(self.layers):
            qkv, input_norm = _folded(layer.qkv, layer.input_norm)
            gate_up, mlp_norm = _folded(layer.gate_up, layer.mlp_norm)
            self.layers[i] = replace(layer, qkv=qkv, input_norm=input_norm, gate_up=gate_up, mlp_norm=mlp_norm)

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        """Rows of the embedding, or of the head, in float32: [len(ids), hidden]"""
        matrix = self.head.weight if head else self.embedding
        wanted = ids.to(self.device, non_blocking=not ids.is_pinned()).long()  # pinned memory might be written too soon
        return matrix.rows(wanted) if isinstance(matrix, PackedWeight) else matrix[wanted].float()

    @torch.no_grad()
    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,  # [layers, 2, slots, kv_heads, head_dim], of its dtype
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """One pass. `layers` runs only these (self-speculation); the stream passes the others unchanged."""
        active = self.active_layers(layers, hidden_layers)
        batch = batch.to(self.device)
        positions = batch.positions.long()
        angles = (self.cos[positions], self.sin[positions])  # each [rows, head_dim / 2]
        local = angles if self._local is None else (self._local[0][positions], self._local[1][positions])
        plan = self._kernels.plan(batch)
        hidden = self._embed(batch.token_ids.long())  # [rows, hidden]
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if i in hidden_layers:
                kept[i] = hidden
            if i not in active:
                continue
            normed = self._norm(hidden, layer.input_norm)
            query, key, value = self._project(layer, normed)
            if i not in self.config.no_rope_layers:
                cos, sin = angles if self.config.window(i) is None else local
                query, key = reference.rope(query, cos, sin), reference.rope(key, cos, sin)
            reference.write_kv(key, value, kv_cache[i], batch.slot_mapping)
            mixed = self._kernels.attention(query, kv_cache[i], plan, self.config.window(i), self.config.score_scale)
            hidden = hidden + self._maybe_norm(self._linear(mixed.flatten(1), layer.output), layer.output_norm)
            given = self._mlp(layer, self._norm(hidden, layer.mlp_norm))
            hidden = hidden + self._maybe_norm(given, layer.mlp_output_norm)
        return self._output(batch, hidden, hidden_layers, kept)

    def _embed(self, token_ids: Tensor) -> Tensor:
        rows = self.embedding[token_ids]
        if self.config.embedding_scale == 1.0:
            return rows
        return rows * torch.tensor(
            self.config.embedding_scale, dtype=self.hidden_dtype
        )  # the factor is rounded, as trained

    def _project(self, layer: Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        qkv = self._linear(normed, layer.qkv).view(normed.shape[0], -1, config.head_dim)  # [rows, all heads, dim]
        query, key, value = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        return query, key, value

    def _mlp(self, layer: Layer, normed: Tensor) -> Tensor:
        gate_up = self._linear(normed, layer.gate_up)
        is_silu = self.config.activation == "silu"
        return self._linear(self._kernels.silu_mul(gate_up) if is_silu else reference.gelu_mul(gate_up), layer.down)

    def _output(
        self, batch: ForwardBatch, hidden: Tensor, hidden_layers: Sequence[int], kept: dict[int, Tensor]
    ) -> ForwardOutput:
        num_layers = self.config.num_layers
        wanted = batch.logits_rows.long()
        if num_layers + 1 in hidden_layers:
            normed = self._norm(hidden, self.final_norm)  # every row, because the caller wants them all
            kept[num_layers + 1] = normed
            last = normed[wanted]
        else:
            last = self._norm(hidden[wanted], self.final_norm) if len(wanted) else hidden[wanted]
        kept[num_layers] = hidden
        vocab = self.config.vocab_size
        logits = self._linear(last, self.head).float() if len(wanted) else hidden.new_empty(0, vocab).float()
        features = torch.stack([kept[i] for i in hidden_layers], dim=1) if hidden_layers else None
        return ForwardOutput(logits, features)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def _maybe_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight = linear.weight
        if isinstance(weight, PackedWeight):
            weight = weight.widened().to(self.hidden_dtype)  # slow: the fused kernels read it as it is
        return self._kernels.linear(x, weight, linear.bias)

    def active_layers(self, layers: Sequence[int] | None, hidden_layers: Sequence[int]) -> frozenset[int]:
        num_layers = self.config.num_layers
        bad = [i for i in layers or () if not 0 <= i < num_layers]
        if bad:
            raise InvalidOptionError(f"layers {bad} do not exist; this model has layers 0 to {num_layers - 1}")
        bad = [i for i in hidden_layers if not 0 <= i <= num_layers + 1]
        if bad:
            raise InvalidOptionError(
                f"hidden_layers {bad} do not exist: 0 to {num_layers - 1} enter a layer, {num_layers} leaves the last, "
                f"{num_layers + 1} is after the final norm"
            )
        return frozenset(range(num_layers) if layers is None else layers)

    def _layer(self, index: int) -> Layer:
        prefix = layer_prefix(index)
        config = self.config
        after = (
            prefix + "post_attention_layernorm.weight"
        )  # before the MLP, or where there are more norms, after attention
        return Layer(
            input_norm=self._tensor(prefix + "input_layernorm.weight"),
            qkv=self._fused(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=self._tensor(prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=self._tensor(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
            output=self._fused(prefix, "self_attn.o_proj"),
            output_norm=self._tensor(after) if config.output_norms else None,
            mlp_norm=self._tensor(prefix + "pre_feedforward_layernorm.weight" if config.output_norms else after),
            gate_up=self._fused(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=self._fused(prefix, "mlp.down_proj"),
            mlp_output_norm=self._tensor(prefix + "post_feedforward_layernorm.weight") if config.output_norms else None,
        )

    def _head(self) -> Weight:
        """A packed one beside its embedding, where both are one matrix: rows are looked up in the embedding."""
        is_tied = self.config.tie_word_embeddings
        packed = self._packed(EMBEDDING if is_tied else HEAD)
        if packed is not None:
            return packed
        return self.embedding if is_tied else self._tensor(HEAD)

    def _packed(self, *names: str) -> PackedWeight | None:
        packed = (
            packed_weight([self._weights[n] for n in names], self.hidden_dtype, self.device) if self._packs else None
        )
        if packed is not None and not packed.has_finite_scales():
            raise ModelLoadError(
                f"{' or '.join(names)} has scales that are not finite numbers: the file is damaged. Fetch it again."
            )
        return packed

    def _fused(self, prefix: str, *names: str) -> Linear:
        """The named linears, stacked: one product instead of several."""
        weight: Weight | None = self._packed(*(f"{prefix}{name}.weight" for name in names))
        if weight is None:
            weight = torch.cat([self._tensor(f"{prefix}{name}.weight") for name in names])
        has_bias = f"{prefix}{names[0]}.bias" in self._weights
        return Linear(weight, torch.cat([self._tensor(f"{prefix}{n}.bias") for n in names]) if has_bias else None)

    def _tensor(self, name: str) -> Tensor:
        stored = self._weights[name]
        wide = dequantize(stored) if isinstance(stored, QuantizedTensor) else stored
        # A weight taken as it is lies where its file put it, and products over it would have that place's bits.
        return aligned(wide.to(device=self.device, dtype=self.hidden_dtype))


def _folded(linear: Linear, gains: Tensor) -> tuple[Linear, Tensor]:
    """The product over rows that the norm only scales, and the gains that are left."""
    weight = linear.weight
    if isinstance(weight, PackedWeight):
        return linear, gains
    folded = (weight.float() * gains.float()).to(weight.dtype)
    return replace(linear, weight=folded), torch.ones_like(gains)
