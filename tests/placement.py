"""The same numbers at another address: what a test of bits moves its tensors by."""

from typing import TypeVar

import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor

OFFSETS = (0, 4, 16, 32, 60)  # bytes after a multiple of 64
NUM_THREADS = (1, 2)

Weight = TypeVar("Weight", Tensor, Tensor | QuantizedTensor)


def at_offset(x: Tensor, offset_bytes: int) -> Tensor:
    """A contiguous copy of x that begins so many bytes after a multiple of 64."""
    memory = torch.empty(x.numel() * x.element_size() + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + offset_bytes
    moved = memory[begin : begin + x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)
    assert moved.data_ptr() % 64 == offset_bytes and moved.is_contiguous()
    return moved


def weights_at_offset(weights: dict[str, Weight], offset_bytes: int) -> dict[str, Weight]:
    """Every plain tensor of a model moved; blocks of a GGUF file are bytes, and packed before anything reads them."""
    return {name: at_offset(w, offset_bytes) if isinstance(w, Tensor) else w for name, w in weights.items()}
