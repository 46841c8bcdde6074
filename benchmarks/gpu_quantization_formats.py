"""Random models of a real shape in the formats that the fused kernels read, for benchmarks/gpu_quantization.py.

Weights are rounded to the nearest value. What a format leaves plain is what checkpoints of it leave plain: embedding
and head, except in `q4_k_m`, which stands for a GGUF file: head, v and half of the down matrices have 8 bits (Q6_K).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.models.layout import EMBEDDING
from paceline.models.quantized import fp8
from paceline.models.quantized.grouped import float8_groups, rows_of
from paceline.ops.packed import GroupedValues

Rounding = Callable[[Tensor], GroupedValues]


def integers(bits: int, group: int, *, minima: bool = False) -> Rounding:
    """`group`: 0 for one scale an output."""

    def rounded(weight: Tensor) -> GroupedValues:
        wide = weight.float()
        runs = wide.unflatten(1, (-1, group or wide.shape[1]))
        top = (1 << bits) - 1
        if minima:
            low = runs.amin(-1)
            scales = ((runs.amax(-1) - low) / top).clamp_min(1e-8)
            zeros = -low / scales
        else:
            scales = (runs.abs().amax(-1) / (top // 2)).clamp_min(1e-8)
            zeros = torch.full_like(scales, float(top // 2 + 1))
        values = (runs / scales[..., None] + zeros[..., None]).round().clamp(0, top)
        return GroupedValues(f"int{bits}", values.to(torch.uint8).flatten(1), scales, zeros)

    return rounded


def float8(block: int | None) -> Rounding:
    return lambda weight: float8_groups(fp8.rounded(weight.float(), None if block is None else (block, block)))


def _q4_k_m(name: str, is_tiny: bool) -> Rounding:
    layer = int(name.split(".")[2]) if "layers" in name else 0
    is_fine = name == EMBEDDING or "v_proj" in name or ("down" in name and layer % 2 == 0)
    return integers(8, 16) if is_fine else integers(4, 16 if is_tiny else 32, minima=True)


def _all_but_embedding(rounding: Rounding) -> Callable[[str, bool], Rounding | None]:
    return lambda name, is_tiny: None if name == EMBEDDING else rounding


# Format -> the rounding of a matrix by its name; None: plain
FORMATS: dict[str, Callable[[str, bool], Rounding | None]] = {
    "bf16": lambda name, is_tiny: None,
    "fp8": _all_but_embedding(float8(None)),
    "fp8-block": lambda name, is_tiny: None if name == EMBEDDING else float8(16 if is_tiny else 128),
    "int8": _all_but_embedding(integers(8, 0)),
    "int4": lambda name, is_tiny: None if name == EMBEDDING else integers(4, 16 if is_tiny else 128),
    "q4_k_m": _q4_k_m,
}


def in_format(weights: dict[str, Tensor], form: str, *, is_tiny: bool) -> dict[str, Tensor | QuantizedTensor]:
    made: dict[str, Tensor | QuantizedTensor] = {}
    for name, weight in weights.items():
        rounding = FORMATS[form](name, is_tiny) if weight.dim() == 2 else None
        made[name] = weight if rounding is None else rows_of(rounding(weight))
    return made
