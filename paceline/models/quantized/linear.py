"""The one form that every integer format is unpacked to, and how it becomes blocks of the native kernels.

    weight[o, i] = (values[o, i] - zeros[o, group(i)]) * scales[o, group(i)]

The kernels' blocks have 32 weights, a scale in f16 and either the usual zero or one of their own; a group of 64 or 128
is several blocks with the same scale. That is exact where groups are runs of a multiple of 32 inputs and scales are
f16. Everything else is quantized again, to int8 with a scale per 32 weights, which is finer than what it came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor

BLOCK = 32  # weights under one scale in the native kernels


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    values: Tensor  # [out, in] uint8, unsigned
    scales: Tensor  # [out, groups] float
    zeros: Tensor  # [out, groups] int32
    bits: int
    groups: Tensor | None = None  # [in]: the group of each input (act-order); None: equal runs

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def split(self, outputs: Sequence[int]) -> "list[QuantizedLinear]":
        """Cut into so many outputs each."""
        values, scales, zeros = (torch.split(x, list(outputs)) for x in (self.values, self.scales, self.zeros))
        return [
            QuantizedLinear(*part, bits=self.bits, groups=self.groups)
            for part in zip(values, scales, zeros, strict=True)
        ]

    @staticmethod
    def joined(parts: "Sequence[QuantizedLinear]") -> "QuantizedLinear":
        """The outputs of all, one after the other. They must have the same groups."""
        values, scales, zeros = (
            torch.cat(x) for x in zip(*((p.values, p.scales, p.zeros) for p in parts), strict=True)
        )
        return QuantizedLinear(values, scales, zeros, parts[0].bits, parts[0].groups)

    def dequantized(self) -> Tensor:
        """[out, in] float32"""
        groups = self.groups
        if groups is None:
            groups = torch.arange(self.values.shape[1]) // self.group_size
        return (self.values.float() - self.zeros.float()[:, groups]) * self.scales.float()[:, groups]

    def exact_blocks(self) -> QuantizedTensor | None:
        """The same weights in blocks of the native kernels; None where no block holds them exactly."""
        half = self.scales.half()
        if self.groups is not None or self.group_size % BLOCK or not torch.equal(half.float(), self.scales.float()):
            return None
        out, inputs = self.shape
        repeats = self.group_size // BLOCK
        scales = half.repeat_interleave(repeats, dim=1).unsqueeze(-1)  # [out, blocks, 1]
        values = self.values.view(out, -1, BLOCK)
        stored = values[..., :16] | values[..., 16:] << 4 if self.bits == 4 else values
        usual = 1 << (self.bits - 1)
        if bool((self.zeros == usual).all()):
            kind = "Q4_0" if self.bits == 4 else "Q8_0"
            stored = stored if self.bits == 4 else stored ^ 128  # unsigned with zero 128 -> signed
            parts = [scales.view(torch.uint8), stored]
        else:
            kind = f"U{self.bits}Z"
            zeros = self.zeros.half().repeat_interleave(repeats, dim=1).unsqueeze(-1)
            parts = [scales.view(torch.uint8), zeros.view(torch.uint8), stored]
        return QuantizedTensor(torch.cat(parts, dim=-1).flatten(1).contiguous(), kind, (out, inputs))


def int8_blocks(weight: Tensor) -> QuantizedTensor | None:
    """[out, in] floats -> int8 with a scale per 32 weights; None where rows do not divide into blocks."""
    out, inputs = weight.shape
    if inputs % BLOCK:
        return None
    parts = weight.float().view(out, -1, BLOCK)
    scales = (parts.abs().amax(-1, keepdim=True) / 127.0).half()
    steps = torch.where(scales > 0, parts / scales.float(), 0.0).round().clamp(-127, 127).to(torch.int8)
    data = torch.cat([scales.view(torch.uint8), steps.view(torch.uint8)], dim=-1)
    return QuantizedTensor(data.flatten(1).contiguous(), "Q8_0", (out, inputs))
