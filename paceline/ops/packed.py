"""Weights of 4 and 8 bits as the fused kernels on CUDA read them (ops/triton/product.py), and their plain twin.

    weight[o, i] = row_scales[o] * rounded((values[o, i] - zeros[o, group(i)]) * scales[o, group(i)])

Values are 4-bit or 8-bit integers, or FP8 numbers (e4m3, with zeros of 0). They lie in 16-bit words: a step of the
kernel's loop reads `into` words of an output, which hold 4 x `into` values of 4 bits, or 2 x `into` of 8 bits. The
first part of a step, its first `into` inputs, is the lowest bits of these words, and so on, so that each part is one
product over neighbouring inputs.

A group's scale and zero are float16, one int32 together. Scales are kept relative to a power of two for each output,
so that float16's range suffices; where an output has one scale only, it is `row_scales` itself, in float32. `rounded`
is to the type of the activations: the kernels multiply in that type, as with a plain weight. Where 4-bit values have
whole numbers for zeros nothing is rounded: `values - zeros` is multiplied, and the sum over a group gets its scale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = {"int4": 4, "int8": 2, "fp8": 2}  # values of a word
BITS = {"int4": 4, "int8": 8, "fp8": 8}
OFFSETS = {"int4": 16.0, "int8": 256.0}  # what a value is added to before its one multiply-add
CENTERS = {"int4": 8.0, "int8": 0.0, "fp8": 0.0}  # zeros are kept less this: the rest of most is small, and finer
LARGEST_HALF = 65504.0
MOST_WHOLE = 127  # zeros up to here leave 128 + zero a number of bfloat16


@dataclass(frozen=True, slots=True)
class GroupedValues:
    """A matrix in equal runs of inputs under one scale each: (values - zeros) * scales."""

    kind: str  # of PARTS
    values: Tensor  # [out, in] uint8: unsigned integers, or the bits of e4m3 numbers
    scales: Tensor  # [out, groups] float32
    zeros: Tensor  # [out, groups] float32

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """[out, in] float32"""
        values = self.values.view(torch.float8_e4m3fn) if self.kind == "fp8" else self.values
        groups = values.float().view(*self.scales.shape, -1)
        return ((groups - self.zeros[..., None]) * self.scales[..., None]).flatten(1)

    def with_group(self, group: int) -> "GroupedValues":
        """`group` divides the present one."""
        times = self.group // group
        scales, zeros = (x.repeat_interleave(times, dim=1) for x in (self.scales, self.zeros))
        return GroupedValues(self.kind, self.values, scales, zeros)

    def coarsest(self) -> "GroupedValues":
        """The same with as few groups as tell the same: a group of 128 may have been stored as four of 32."""
        count = self.scales.shape[1]
        for fewer in range(1, count):
            if count % fewer == 0:
                pairs = torch.stack([self.scales, self.zeros]).view(2, len(self.values), fewer, -1)
                if bool((pairs == pairs[..., :1]).all()):
                    return GroupedValues(self.kind, self.values, pairs[0, ..., 0], pairs[1, ..., 0])
        return self


def joined(parts: Sequence[GroupedValues]) -> GroupedValues | None:
    """The outputs of all, one after the other, 4 bits as 8 where there are both; None where no format has all."""
    kinds = {part.kind for part in parts}
    if "fp8" in kinds and len(kinds) > 1:
        return None
    group = math.gcd(*(part.group for part in parts))
    same = [part.with_group(group) for part in parts]
    values, scales, zeros = (torch.cat(x) for x in zip(*((p.values, p.scales, p.zeros) for p in same), strict=True))
    return GroupedValues(max(kinds), values, scales, zeros)  # "int8" > "int4"


@dataclass(frozen=True, slots=True)
class PackedWeight:
    words: Tensor  # [out, steps * into] int16
    scales: Tensor  # [1 + groups, out] int32: the bits of row_scales, then of each group's scale and zero
    kind: str
    group: int  # inputs
    into: int  # inputs of a part of a step
    shape: tuple[int, int]  # [out, in]
    dtype: torch.dtype  # that it is multiplied in
    scales_sums: bool = False  # scales are for sums over groups, not for values: nothing is rounded

    def has_finite_scales(self) -> bool:
        rows, pairs = self.scales[0].view(torch.float32), self.scales[1:].view(torch.float16)
        return bool(rows.isfinite().all()) and bool(pairs.isfinite().all())

    def rows(self, which: Tensor) -> Tensor:
        """[len(which), in] float32: these outputs, as the kernels multiply them."""
        num_in, parts, bits = self.shape[1], PARTS[self.kind], BITS[self.kind]
        words = self.words[which].to(torch.int32).view(len(which), -1, 1, self.into)
        shifts = torch.arange(parts, device=words.device, dtype=torch.int32).view(1, 1, -1, 1) * bits
        values = ((words >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :num_in]
        pairs = self.scales[1:, which].t().flatten().view(torch.float16).float()
        pairs = pairs.view(len(which), -1, 2).repeat_interleave(self.group, dim=1)
        zeros = pairs[..., 1] + CENTERS[self.kind]
        if self.scales_sums:
            made = (values - zeros) * pairs[..., 0]
        else:
            made = _widened(values, pairs[..., 0], zeros, self.kind).to(self.dtype).float()
        return made * self.scales[0, which].view(torch.float32)[:, None]

    def widened(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0], device=self.words.device))


Weight = Tensor | PackedWeight


def num_bytes(weight: Weight) -> int:
    if isinstance(weight, PackedWeight):
        return weight.words.nbytes + weight.scales.nbytes
    return weight.nbytes


def plain(weight: Weight) -> Tensor:
    """[out, in] float32"""
    return weight.widened() if isinstance(weight, PackedWeight) else weight.float()


def _widened(values: Tensor, scales: Tensor, zeros: Tensor, kind: str) -> Tensor:
    if kind == "fp8":
        return values.to(torch.uint8).view(torch.float8_e4m3fn).float() * scales
    bias = (zeros + OFFSETS[kind]) * scales  # in float32, as the kernels have it; float64 stands for a fused sum
    return ((values + OFFSETS[kind]).double() * scales.double() - bias.double()).float()


def pack(grouped: GroupedValues, into: int, dtype: torch.dtype) -> PackedWeight:
    num_out, num_in = grouped.values.shape
    group = grouped.group
    if group < num_in and group % into:
        raise ValueError(f"groups of {group} inputs cannot be read {into} at a time")
    row_scales, pairs = _scale_pairs(grouped)
    scales = torch.cat([row_scales.view(torch.int32)[None], pairs])
    words = _words(grouped.values, PARTS[grouped.kind], BITS[grouped.kind], into)
    are_whole = grouped.kind == "int4" and bool(((grouped.zeros == grouped.zeros.round()) & (grouped.zeros >= 0)).all())
    scales_sums = are_whole and float(grouped.zeros.max()) <= MOST_WHOLE
    return PackedWeight(words, scales, grouped.kind, group, into, (num_out, num_in), dtype, scales_sums)


def _words(values: Tensor, parts: int, bits: int, into: int) -> Tensor:
    num_out, num_in = values.shape
    padded = torch.nn.functional.pad(values, (0, -num_in % (into * parts)))  # what stands there meets zeros
    cut = padded.view(num_out, -1, parts, into)
    words = cut[:, :, 0].to(torch.int16)
    for part in range(1, parts):
        words |= cut[:, :, part].to(torch.int16) << (bits * part)
    return words.flatten(1)


def _scale_pairs(grouped: GroupedValues) -> tuple[Tensor, Tensor]:
    """[out] float32, and [groups, out] int32"""
    scales = grouped.scales
    if scales.shape[1] == 1:
        row_scales, relative = scales[:, 0].contiguous(), torch.ones_like(scales)
    else:
        largest = scales.abs().amax(1)
        row_scales = torch.exp2(torch.floor(torch.log2(torch.where(largest > 0, largest, 1.0))))
        relative = scales / row_scales[:, None]
    pairs = torch.stack([relative, grouped.zeros - CENTERS[grouped.kind]], dim=-1).half()
    return row_scales, pairs.view(torch.int32).squeeze(-1).t().contiguous()


def with_minima(kind: str, values: Tensor, scales: Tensor, minima: Tensor) -> GroupedValues:
    """Of values * scales - minima, as GGUF has them. Where a scale is nothing beside its minimum, that remains."""
    flat = minima.abs() > scales.abs() * (LARGEST_HALF / 2)
    group = values.shape[1] // scales.shape[1]
    values = torch.where(flat.repeat_interleave(group, dim=1), 0, values)
    zeros = torch.where(flat, 1.0, minima / torch.where(scales == 0, 1.0, scales))
    return GroupedValues(kind, values, torch.where(flat, minima, scales), zeros)
