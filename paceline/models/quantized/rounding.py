"""Floats to small integers: the grid of a group (its scale and zero), and rounding to the nearest point of it.

Scales are float16 numbers from the start, so what is rounded here is what a folder stores.
"""

import torch
from torch import Tensor

from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.scheme import WHOLE_ROW


def grid(
    parts: Tensor,  # [..., group size]
    bits: int,
    *,
    symmetric: bool,
    shrink: Tensor | None = None,  # [...]: the share of the range that is kept
) -> tuple[Tensor, Tensor]:
    """scale and zero of each group, [...] float32 both: weight = (value - zero) * scale"""
    most = 2**bits - 1
    if symmetric:
        low, high = -parts.abs().amax(-1), parts.abs().amax(-1)
        steps = most - 1  # the range lies evenly around the zero in the middle: one value is left over
    else:
        low, high, steps = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0), most
    width = (high - low) if shrink is None else (high - low) * shrink
    scales = (width / steps).half().float()
    scales = torch.where(scales > 0, scales, 1.0)  # all zeros, or too small for float16: then zeros they become
    if symmetric:
        return scales, torch.full_like(scales, 2.0 ** (bits - 1))
    kept_low = low if shrink is None else low * shrink
    return scales, (-kept_low / scales).round().clamp(1, most)  # GPTQ's layout stores zeros less one


def to_grid(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """The nearest values, as floats; all of one shape."""
    return (weight / scales + zeros).round().clamp(0, 2**bits - 1)


def rounded(
    weight: Tensor,  # [out, in] float32
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    shrink: Tensor | None = None,  # [out, groups]
) -> QuantizedLinear:
    out, inputs = weight.shape
    parts = weight.view(out, -1, inputs if group_size == WHOLE_ROW else group_size)
    scales, zeros = grid(parts, bits, symmetric=symmetric, shrink=shrink)
    values = to_grid(parts, scales[..., None], zeros[..., None], bits)
    return QuantizedLinear(values.to(torch.uint8).view(out, inputs), scales, zeros.int(), bits)
