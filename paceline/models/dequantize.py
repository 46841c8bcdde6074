"""Quantized blocks, widened to float32: exactly the numbers that the file means."""

import numpy as np
import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor


def dequantize(quantized: QuantizedTensor) -> Tensor:
    """[rows, columns] float32"""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as widen

    values = widen(quantized.data.cpu().numpy(), GGMLQuantizationType[quantized.kind])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(quantized.shape)
