"""A model loaded to draft with, in 4 bits whatever its file has: on the native CPU kernels, its packed weights kept.

A draft pass waits for memory, so with half of the bytes it takes half of the time; and a draft that is wrong a little
more often costs little, because the target verifies it anyway. Matrices of more than 4 bits, the head among them, are
rounded to 4, with a scale and a least value for each 32 weights. The embedding stays: only a few rows of it are read.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, ShapedWeights, Weights
from paceline.models.dequantize import dequantize
from paceline.models.layout import EMBEDDING, HEAD
from paceline.models.loader import LoadedModel, multiplies_int16
from paceline.models.loading import gguf_path, load_config, load_tokenizer, read_weights
from paceline.models.memory import check_memory
from paceline.models.native import NATIVE_PARTS, NativeDecoder
from paceline.models.packed_cache import LEAST_SOURCE_BYTES, packed_entry, weight_files
from paceline.ops.native.layers import nibble_blocks

BLOCK = 32  # weights under one scale
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "U4Z")  # kept as they are
ROWS_AT_A_TIME = 8192  # of a matrix that is widened to be rounded: a head is large


class LeanWeights(ShapedWeights):
    """The weights of a model, each rounded when it is asked for; the head is a matrix of its own."""

    def __init__(self, stored: Weights, config: ModelConfig) -> None:
        self._stored = stored
        self._head = EMBEDDING if config.tie_word_embeddings else HEAD

    def __getitem__(self, name: str) -> Tensor | QuantizedTensor:
        if name == EMBEDDING:
            return self._stored[name]
        return rounded(self._stored[self._source(name)])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._stored, HEAD]))

    def __len__(self) -> int:
        return len({*self._stored, HEAD})

    def shape(self, name: str) -> tuple[int, ...]:
        stored, source = self._stored, self._source(name)
        return stored.shape(source) if isinstance(stored, ShapedWeights) else tuple(stored[source].shape)

    def _source(self, name: str) -> str:
        return self._head if name == HEAD else name


def rounded(weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
    """A matrix in 4 bits; vectors, and matrices that have no blocks of 32, as they are."""
    if len(weight.shape) != 2 or weight.shape[1] % BLOCK:
        return weight
    if isinstance(weight, QuantizedTensor) and weight.kind in FOUR_BITS:
        return weight
    parts = [_nibbles(weight, begin) for begin in range(0, weight.shape[0], ROWS_AT_A_TIME)]
    return QuantizedTensor(torch.cat(parts), "Q4_1", (weight.shape[0], weight.shape[1]))


def _nibbles(weight: Tensor | QuantizedTensor, begin: int) -> Tensor:
    rows = slice(begin, begin + ROWS_AT_A_TIME)
    wide = dequantize(weight.rows(rows)) if isinstance(weight, QuantizedTensor) else weight[rows].float()
    return nibble_blocks(wide).flatten(1)


def can_be_lean(config: ModelConfig) -> bool:
    """Whether the native kernels have all parts of this model."""
    return not config.special_parts - NATIVE_PARTS


def is_large(path: Path) -> bool:
    """Does a pass wait for memory? The small ones load at once, and have their weights in caches in part."""
    files = [path] if path.is_file() else weight_files(path)
    return sum(file.stat().st_size for file in files) >= LEAST_SOURCE_BYTES


def load_lean_model(name: str, path: Path, *, num_threads: int | None) -> LoadedModel:
    config = load_config(path)
    quantization = "gguf" if gguf_path(path) else "checkpoint"  # what is not rounded stays as it is stored
    kv_dtype = torch.int16 if multiplies_int16(config) else torch.float16
    entry = packed_entry(path, dtype=torch.float16, quantization=quantization, lean="int4")
    packed = entry.read() if entry else None
    if not packed:
        check_memory(path, config, torch.float16, quantization, "cpu")
    decoder = NativeDecoder(
        replace(config, tie_word_embeddings=False),
        packed or LeanWeights(read_weights(path, config, keep_quantized=True), config),
        dtype=torch.float16,
        quantization=quantization,
        num_threads=num_threads,
        kv_dtype=kv_dtype,
    )
    if entry and not packed:
        entry.write(decoder.weights)
    return LoadedModel(name, path, config, decoder, load_tokenizer(path), "native kernels, 4-bit weights to draft with")
