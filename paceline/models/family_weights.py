"""A family's stored tensors under the names and in the parts that every decoder takes.

Phi-3 stores q, k and v as one matrix and gate and up as another: they are cut apart by rows, quantized blocks too. A
Hugging Face folder of Gemma stores its norms' weights less one; a GGUF file as they multiply.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, ShapedWeights, Weights

Place = tuple[str, slice | None]  # stored name, and which of its rows


@dataclass(frozen=True, slots=True)
class _Fused:
    stored: str
    parts: tuple[tuple[str, int], ...]  # name, rows


class FamilyWeights(ShapedWeights):
    def __init__(self, stored: Weights, config: ModelConfig, *, norms_less_one: bool) -> None:
        self._stored, self._norms_less_one = stored, norms_less_one
        self._places: dict[str, Place] = {}
        for name in stored:
            self._places.update(_cut(name, _stored_rows(stored, name), config))

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        stored, rows = self._places[name]
        tensor = self._stored[stored]
        if isinstance(tensor, QuantizedTensor):
            return tensor if rows is None else tensor.rows(rows)
        if self._norms_less_one and "norm" in name:
            return tensor.float() + 1.0
        return tensor if rows is None else tensor[rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def notes(self) -> str:
        return self._stored.notes() if isinstance(self._stored, ShapedWeights) else ""

    def shape(self, name: str) -> tuple[int, ...]:
        stored, rows = self._places[name]
        shape = _shape(self._stored, stored)
        return shape if rows is None else (rows.stop - rows.start, *shape[1:])


def family_weights(stored: Weights, config: ModelConfig, *, is_gguf: bool) -> Weights:
    if config.family == "phi3" or (config.family == "gemma3" and not is_gguf):
        return FamilyWeights(stored, config, norms_less_one=config.family == "gemma3")
    return stored


def stored_linear(config: ModelConfig, name: str) -> str:
    """The name of the matrix in which a folder keeps this one of a layer's, alone or among others in their order."""
    return next((fused.stored for fused in _fused_parts(config) if name in dict(fused.parts)), name)


def stored_norm(config: ModelConfig, weight: Tensor) -> Tensor:
    """A norm's weight as a Hugging Face folder has it."""
    return weight - 1.0 if config.family == "gemma3" else weight


def _cut(name: str, num_rows: int, config: ModelConfig) -> dict[str, Place]:
    """Our names for the parts of a stored tensor. One of a wrong size keeps its name, and is then refused as extra."""
    for fused in _fused_parts(config):
        prefix, found, suffix = name.partition(fused.stored)
        if found and num_rows == sum(rows for _, rows in fused.parts):
            places: dict[str, Place] = {}
            start = 0
            for part, rows in fused.parts:
                places[prefix + part + suffix] = (name, slice(start, start + rows))
                start += rows
            return places
    return {name: (name, None)}


def _fused_parts(config: ModelConfig) -> tuple[_Fused, ...]:
    if config.family != "phi3":
        return ()
    q, kv, intermediate = config.q_size, config.kv_size, config.intermediate_size
    return (
        _Fused(
            "self_attn.qkv_proj",
            (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
        ),
        _Fused("mlp.gate_up_proj", (("mlp.gate_proj", intermediate), ("mlp.up_proj", intermediate))),
    )


def _stored_rows(stored: Weights, name: str) -> int:
    shape = _shape(stored, name)
    return shape[0] if shape else 0


def _shape(stored: Weights, name: str) -> tuple[int, ...]:
    return stored.shape(name) if isinstance(stored, ShapedWeights) else tuple(stored[name].shape)
