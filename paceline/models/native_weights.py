"""Weights on their way into a native model: packed from a file's tensors, or mapped as an earlier load packed them."""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, Weights
from paceline.errors import UnsupportedModelError
from paceline.models.dequantize import dequantize
from paceline.models.layout import EMBEDDING, FINAL_NORM, HEAD, layer_prefix
from paceline.models.packed_weights import PackedMatrix, PackedWeights
from paceline.ops.native.library import FORMATS, MATRICES, SOURCES, STATUS, VECTORS, Packed, library

PANEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYER_MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class NativeWeights:
    def __init__(self, model: int, config: ModelConfig, dtype: torch.dtype, quantization: str | None) -> None:
        self._model, self._config, self._dtype, self._quantization = model, config, dtype, quantization
        self._library = library()
        self._vectors: dict[tuple[str, int], Tensor] = {}

    def load(self, weights: Weights) -> None:
        """Pack every tensor. Each is looked up once and dropped before the next, so a lazy mapping stays small."""
        for part, layer, name in self._matrices():
            self._set_matrix(part, layer, weights[name], weights.get(name.removesuffix("weight") + "bias"))
        for part, layer, name in self._norms():
            self._set_vector(part, layer, _float_vector(weights[name]))
        self._tie()

    def use(self, packed: PackedWeights) -> None:
        """Read the matrices where they lie. `packed` must live as long as the model."""
        for matrix in packed.matrices:
            status = self._library.pl_model_map_matrix(
                self._model,
                MATRICES[matrix.part],
                matrix.layer,
                matrix.format,
                matrix.rows,
                matrix.columns,
                packed.address(matrix.offset),
                None if matrix.bias_offset is None else packed.address(matrix.bias_offset),
            )
            _check(status, matrix.part, matrix.layer, matrix.rows, matrix.columns)
        for (part, layer), vector in packed.vectors.items():
            self._set_vector(part, layer, torch.tensor(vector, dtype=torch.float32))
        self._tie()

    def packed(self) -> Iterator[tuple[PackedMatrix, int, int | None]]:
        """Every matrix as it lies in memory: (what it is, address of its bytes, address of its bias)."""
        for part, layer, _ in self._matrices():
            found = Packed()
            status = self._library.pl_model_packed(self._model, MATRICES[part], layer, ctypes.byref(found))
            _check(status, part, layer, found.rows, found.columns)
            what = PackedMatrix(part, layer, found.format, found.rows, found.columns, found.num_bytes, 0, None)
            yield what, found.data, found.bias

    @property
    def vectors(self) -> dict[tuple[str, int], list[float]]:
        return {place: vector.tolist() for place, vector in self._vectors.items()}

    def _matrices(self) -> Iterator[tuple[str, int, str]]:
        """(part, layer, name of the tensor)"""
        yield "embed", 0, EMBEDDING
        if not self._config.tie_word_embeddings:
            yield "head", 0, HEAD
        for layer in range(self._config.num_layers):
            for part, name in LAYER_MATRICES.items():
                yield part, layer, f"{layer_prefix(layer)}{name}.weight"

    def _norms(self) -> Iterator[tuple[str, int, str]]:
        yield "final_norm", 0, FINAL_NORM
        for layer in range(self._config.num_layers):
            prefix = layer_prefix(layer)
            yield "input_norm", layer, prefix + "input_layernorm.weight"
            yield "post_norm", layer, prefix + "post_attention_layernorm.weight"
            if self._config.qk_norm:
                yield "q_norm", layer, prefix + "self_attn.q_norm.weight"
                yield "k_norm", layer, prefix + "self_attn.k_norm.weight"

    def _tie(self) -> None:
        if self._config.tie_word_embeddings:
            self._library.pl_model_tie_head(self._model)

    def _set_matrix(
        self, part: str, layer: int, weight: Tensor | QuantizedTensor, bias: Tensor | QuantizedTensor | None
    ) -> None:
        source, data, wanted = self._source_of(weight)
        rows, columns = weight.shape
        wide_bias = None if bias is None else _float_vector(bias)
        status = self._library.pl_model_set_matrix(
            self._model,
            MATRICES[part],
            layer,
            source,
            wanted,
            rows,
            columns,
            data.data_ptr(),
            None if wide_bias is None else wide_bias.data_ptr(),
        )
        _check(status, part, layer, rows, columns)

    def _source_of(self, weight: Tensor | QuantizedTensor) -> tuple[int, Tensor, int]:
        """(kind, data, panel format) of a matrix."""
        if isinstance(weight, QuantizedTensor):
            if weight.kind in SOURCES and self._quantization != "int8":
                source = SOURCES[weight.kind]
                return source, weight.data.contiguous(), int(self._library.pl_natural_format(source))
            # int8 also takes the blocks that panels do not know: it is finer than any of them.
            return SOURCES["float32"], dequantize(weight).contiguous(), FORMATS["int8"]
        if weight.dtype not in PANEL_TYPES:
            weight = weight.float()
        is_own = self._dtype == torch.float32 or self._quantization in (
            "gguf",
            "checkpoint",
        )  # then `dtype` is of keys and values
        kept = weight.dtype if is_own else self._dtype
        name = "int8" if self._quantization == "int8" else _name(kept)
        return SOURCES[_name(weight.dtype)], weight.detach().cpu().contiguous(), FORMATS[name]

    def _set_vector(self, part: str, layer: int, vector: Tensor) -> None:
        self._vectors[part, layer] = vector
        self._library.pl_model_set_vector(self._model, VECTORS[part], layer, vector.numel(), vector.data_ptr())


def _check(status: int, part: str, layer: int, rows: int, columns: int) -> None:
    if status:
        raise UnsupportedModelError(f"matrix {part} of layer {layer} ({rows} x {columns}): {STATUS[status]}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _float_vector(weight: Tensor | QuantizedTensor) -> Tensor:
    wide = dequantize(weight) if isinstance(weight, QuantizedTensor) else weight
    return wide.detach().cpu().float().flatten().contiguous()
