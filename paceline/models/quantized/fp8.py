"""FP8 weights (e4m3) with a scale per tensor, per output or per block of outputs and inputs.

`weight_scale` and DeepSeek's `weight_scale_inv` both multiply. A static `input_scale` is not needed: activations stay
in a finer type than FP8 here. No block of integers holds such weights exactly, so they are widened.
"""

import torch
from torch import Tensor

from paceline.models.quantized.parts import Parts
from paceline.models.quantized.scheme import Scheme

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
OPTIONAL_NAMES = ("input_scale",)


def unpack(parts: Parts, scheme: Scheme) -> Tensor:
    """[out, in] float32"""
    weight = parts.take("weight")
    parts.check_dtype("weight", torch.float8_e4m3fn)
    name = next((name for name in SCALE_NAMES if parts.find(name) is not None), SCALE_NAMES[-1])
    scale = parts.take(name).float()
    parts.check_finite(name)
    wide = weight.float()
    if not bool(wide.isfinite().all()):
        parts.fail("weight", "has values that are not numbers")
    outputs, inputs = weight.shape
    if scheme.block is None:
        if scale.numel() not in (1, outputs):
            parts.fail(name, f"has shape {tuple(scale.shape)}; it must have 1 value, or one for each of {outputs} rows")
        return wide * scale.reshape(-1, 1)
    rows, columns = scheme.block
    parts.check_shape(name, (-(-outputs // rows), -(-inputs // columns)))
    spread = scale.repeat_interleave(rows, dim=0)[:outputs].repeat_interleave(columns, dim=1)[:, :inputs]
    return wide * spread


def shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    outputs, inputs = parts.take("weight").shape
    return outputs, inputs
