"""Quantized blocks as values under scales and zeros (ops/packed.py), for the kernels on CUDA: the numbers of the file.

GGUF's blocks, ours of the native kernels, and rows of any group size: "G4", "G8" and "GF8" are all scales and zeros of
a row, in turn, in float32, then its values, one byte each (4 bits, 8 bits, FP8).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.weights import QuantizedTensor
from paceline.models.quantized.fp8 import Float8Linear
from paceline.models.quantized.linear import QuantizedLinear
from paceline.ops.packed import GroupedValues, PackedWeight, joined, pack, with_minima
from paceline.ops.triton.tiles import packed_tile

GROUPED_KINDS = {"G4": "int4", "G8": "int8", "GF8": "fp8"}
LEAST_GROUP = 16  # inputs of the smallest product in tensor cores


def packed_weight(
    parts: Sequence[Tensor | QuantizedTensor], dtype: torch.dtype, device: torch.device
) -> PackedWeight | None:
    """These matrices, one under the other, as the kernels read them; None where they have no format for them."""
    found = [grouped_values(part, device) for part in parts if isinstance(part, QuantizedTensor)]
    whole = joined(found) if len(found) == len(parts) else None
    if whole is None:
        return None
    whole = whole.coarsest()
    if whole.group % LEAST_GROUP:
        return None
    num_out, num_in = whole.values.shape
    return pack(whole, packed_tile(whole.kind, num_out, num_in, whole.group).into, dtype)


def rows_of(grouped: GroupedValues) -> QuantizedTensor:
    pairs = torch.stack([grouped.scales.float(), grouped.zeros.float()], dim=-1).flatten(1).contiguous()
    data = torch.cat([pairs.view(torch.uint8), grouped.values], dim=1)
    kind = next(kind for kind, own in GROUPED_KINDS.items() if own == grouped.kind)
    return QuantizedTensor(data, kind, (grouped.values.shape[0], grouped.values.shape[1]))


def integer_groups(linear: QuantizedLinear) -> GroupedValues | None:
    """None with act-order: a group is then no run of inputs."""
    if linear.groups is not None:
        return None
    return GroupedValues(f"int{linear.bits}", linear.values, linear.scales.float(), linear.zeros.float())


def float8_groups(linear: Float8Linear) -> GroupedValues:
    """A scale per block of outputs and inputs becomes one for each output and run of inputs."""
    num_out, num_in = linear.values.shape
    scales = linear.scales
    if linear.block is not None:
        rows, columns = linear.block
        run = columns if num_in % columns == 0 else LEAST_GROUP if columns % LEAST_GROUP == 0 else 1
        scales = scales.repeat_interleave(rows, dim=0)[:num_out].repeat_interleave(columns // run, dim=1)
        scales = scales[:, : num_in // run]
    scales = scales.float().expand(num_out, -1)
    return GroupedValues("fp8", linear.values.view(torch.uint8), scales, torch.zeros_like(scales))


def grouped_values(quantized: QuantizedTensor, device: torch.device) -> GroupedValues:
    data, kind = quantized.data.to(device), quantized.kind
    if kind in GROUPED_KINDS:
        return _grouped_rows(data, kind, quantized.shape[1])
    blocks = data.view(quantized.shape[0], -1, BLOCK_BYTES[kind])
    if kind in ("Q4_K", "Q5_K"):
        return _superblocks(blocks, kind)
    if kind == "Q6_K":
        return _q6_k(blocks)
    return _blocks(blocks, kind)


BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "U4Z": 20, "U8Z": 36, "Q4_K": 144, "Q5_K": 176,
    "Q6_K": 210,
}  # fmt: skip


def _grouped_rows(data: Tensor, kind: str, num_in: int) -> GroupedValues:
    pairs = data[:, :-num_in].contiguous().view(torch.float32).view(len(data), -1, 2)
    return GroupedValues(
        GROUPED_KINDS[kind], data[:, -num_in:].contiguous(), pairs[..., 0].contiguous(), pairs[..., 1].contiguous()
    )


def _halves(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    """[out, blocks * count] float32, from float16 at this byte of each block"""
    return blocks[..., at : at + 2 * count].contiguous().view(torch.float16).float().flatten(1)


def _nibbles(stored: Tensor) -> Tensor:
    return torch.cat([stored & 15, stored >> 4], dim=-1)


def _blocks(blocks: Tensor, kind: str) -> GroupedValues:
    """Blocks of 32: a scale, perhaps a minimum or zero, perhaps each value's fifth bit, then four or eight bits."""
    scales = _halves(blocks, 0)
    has_second = kind in ("Q4_1", "Q5_1", "U4Z", "U8Z")
    at = 4 if has_second else 2
    if kind in ("Q8_0", "U8Z"):
        values = blocks[..., at:] ^ (128 if kind == "Q8_0" else 0)
    else:
        values = _nibbles(blocks[..., -16:])
    if kind in ("Q5_0", "Q5_1"):
        shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)
        values = values | ((blocks[..., at : at + 4, None] >> shifts) & 1).flatten(-2) << 4
    form = "int4" if kind in ("Q4_0", "Q4_1", "U4Z") else "int8"
    if kind in ("Q4_1", "Q5_1"):
        return with_minima(form, values.flatten(1), scales, -_halves(blocks, 2))
    zeros = {"Q4_0": 8.0, "Q5_0": 16.0, "Q8_0": 128.0}.get(kind)
    wide_zeros = _halves(blocks, 2) if zeros is None else torch.full_like(scales, zeros)
    return GroupedValues(form, values.flatten(1), scales, wide_zeros)


def _superblocks(blocks: Tensor, kind: str) -> GroupedValues:
    """256 values: eight groups of 32, whose scales and minima are six bits each of a common one."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale_steps = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], dim=-1)  # [out, blocks, 8]
    minimum_steps = torch.cat([middle & 63, (high >> 4) | (middle >> 6) << 4], dim=-1)
    scales = (_halves(blocks, 0)[..., None] * scale_steps.float()).flatten(1)
    minima = (_halves(blocks, 2)[..., None] * minimum_steps.float()).flatten(1)
    num_out, count = blocks.shape[:2]
    values = _nibbles(blocks[..., -128:].reshape(num_out, count, 4, 32))  # [out, blocks, 4, 64]
    if kind == "Q5_K":
        shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
        values = values | (((blocks[..., None, 16:48] >> shifts) & 1) << 4).reshape(num_out, count, 4, 64)
    return with_minima("int4" if kind == "Q4_K" else "int8", values.flatten(1), scales, minima)


def _q6_k(blocks: Tensor) -> GroupedValues:
    """256 values: sixteen groups of 16, each with an 8-bit factor of a common scale."""
    num_out, count = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(num_out, count, 2, 64))  # [out, blocks, halves, 128]
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)[:, None]
    high = ((blocks[..., 128:192].reshape(num_out, count, 2, 1, 32) >> shifts) & 3).flatten(-2)
    factors = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = (_halves(blocks, 208)[..., None] * factors).flatten(1)
    return GroupedValues("int8", (low | high << 4).flatten(1), scales, torch.full_like(scales, 32.0))
