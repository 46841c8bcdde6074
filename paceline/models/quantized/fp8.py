"""FP8 weights (e4m3) with a scale per tensor, per output or per block of outputs and inputs.

`weight_scale` and DeepSeek's `weight_scale_inv` both multiply. A static `input_scale` is not needed: activations stay
in a finer type than FP8 here. No block of integers holds such weights exactly: on a CPU they are widened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import InvalidOptionError
from paceline.models.quantized.parts import Parts
from paceline.models.quantized.scheme import Scheme

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
OPTIONAL_NAMES = ("input_scale",)
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True)
class Float8Linear:
    values: Tensor  # [out, in] float8_e4m3fn
    scales: Tensor  # [out, 1] or [1, 1], or with blocks [blocks of outputs, blocks of inputs], float32
    block: tuple[int, int] | None = None

    @staticmethod
    def joined(parts: "Sequence[Float8Linear]") -> "Float8Linear":
        """The outputs of all, one after the other. Blocks must end where a part does."""
        block = parts[0].block
        if block is not None and any(len(part.values) % block[0] for part in parts[:-1]):
            raise InvalidOptionError(
                f"matrices that this model stores as one cannot be cut into blocks of {block[0]} outputs: leave "
                "--block out"
            )
        return Float8Linear(torch.cat([p.values for p in parts]), torch.cat([p.scales for p in parts]), block)

    def dequantized(self) -> Tensor:
        """[out, in] float32"""
        scales = self.scales if self.block is None else _spread(self.scales, self.block, self.values.shape)
        return self.values.float() * scales


def unpack(parts: Parts, scheme: Scheme) -> Float8Linear:
    weight = parts.take("weight")
    parts.check_dtype("weight", torch.float8_e4m3fn)
    name = next((name for name in SCALE_NAMES if parts.find(name) is not None), SCALE_NAMES[-1])
    scale = parts.take(name).float()
    parts.check_finite(name)
    if not bool(weight.float().isfinite().all()):
        parts.fail("weight", "has values that are not numbers")
    outputs, inputs = weight.shape
    if scheme.block is None:
        if scale.numel() not in (1, outputs):
            parts.fail(name, f"has shape {tuple(scale.shape)}; it must have 1 value, or one for each of {outputs} rows")
        return Float8Linear(weight, scale.reshape(-1, 1))
    rows, columns = scheme.block
    parts.check_shape(name, (-(-outputs // rows), -(-inputs // columns)))
    return Float8Linear(weight, scale, scheme.block)


def shape(parts: Parts, scheme: Scheme) -> tuple[int, int]:
    outputs, inputs = parts.take("weight").shape
    return outputs, inputs


def rounded(weight: Tensor, block: tuple[int, int] | None) -> Float8Linear:
    """[out, in] floats, each to the nearest FP8 number, with the largest of a row or block at FP8's largest."""
    outputs, inputs = weight.shape
    if block is None:
        scales = weight.abs().amax(1, keepdim=True) / LARGEST
    else:
        rows, columns = block
        padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
        parts = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        scales = parts.abs().amax(dim=(1, 3)) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)  # all zeros: any scale will do
    spread = scales if block is None else _spread(scales, block, weight.shape)
    return Float8Linear((weight / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales, block)


def pack(linear: Float8Linear) -> dict[str, Tensor]:
    """As `unpack` reads it: a block's scale has DeepSeek's name."""
    return {"weight": linear.values, SCALE_NAMES[0] if linear.block else SCALE_NAMES[1]: linear.scales}


def _spread(scales: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """[outputs, inputs]: each weight's scale"""
    rows, columns = block
    return scales.repeat_interleave(rows, dim=0)[: shape[0]].repeat_interleave(columns, dim=1)[:, : shape[1]]
