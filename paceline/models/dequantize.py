"""Quantized blocks, widened to float32: exactly the numbers that the file means."""

import numpy as np
import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.models.quantized.grouped import GROUPED_KINDS, grouped_values

ZERO_KINDS = ("U4Z", "U8Z")  # ours: a scale, a zero and 32 unsigned values (ops/native/src/pack.h)


def dequantize(quantized: QuantizedTensor) -> Tensor:
    """[rows, columns] float32"""
    if quantized.kind in ZERO_KINDS:
        return _with_zeros(quantized)
    if quantized.kind in GROUPED_KINDS:
        return grouped_values(quantized, quantized.data.device).dequantized()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as widen

    values = widen(quantized.data.cpu().numpy(), GGMLQuantizationType[quantized.kind])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(quantized.shape)


def _with_zeros(quantized: QuantizedTensor) -> Tensor:
    size = 20 if quantized.kind == "U4Z" else 36
    blocks = quantized.data.cpu().contiguous().view(quantized.shape[0], -1, size)
    scales, zeros = (blocks[..., at : at + 2].contiguous().view(torch.float16).float() for at in (0, 2))
    values = blocks[..., 4:]
    if quantized.kind == "U4Z":
        values = torch.cat([values & 15, values >> 4], dim=-1)
    return ((values.float() - zeros) * scales).view(quantized.shape)
