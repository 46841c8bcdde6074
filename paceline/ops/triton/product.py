"""The sum that every fused kernel is built around: rows x outputs, K from front to back, in float32.

A product behind an RMSNorm multiplies rows that were not scaled, and scales the finished sum. Where the sum of a row's
squares comes from:

- SUMMED: the kernel that wrote the row added up the squares of each 16 of its values (fused_linear.py). `stream` has
  these sums.
- FOLDED: it is the diagonal of rows times rows, a product with the speed of the other one.
- GAINED: the same of `stream`; the rows that are multiplied were multiplied with the norm's gains.
- NORMED: norm_rows.py has found the scales already, with the bits of FOLDED and GAINED: `stream` has them.

The norm's gains are in the weight (`Decoder.fold_norms`); rows before a weight that cannot take them in were multiplied
with them by the kernel that wrote the stream (fused_linear.py).

Rows may be wider than the weight: they are rounded to its type.

A product has its rows first, or its outputs (OUTS_FIRST): Hopper's larger instruction takes 64 or more of what comes
first, and as few as 16 of the other. That does not show in the bits, nor does the instruction (tiles.py).

A packed weight (ops/packed.py) is widened to the rows' type in registers, step by step: what is multiplied, and in
which order, is what a plain weight of these values would give. A step has several parts, one for each value of a word.
Where zeros are whole numbers, 4-bit values less their zero are multiplied as they are, and each group's sum is scaled:
the sum over a step, where groups are not shorter, or over a part of one.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.packed import PackedWeight, Weight
from paceline.ops.triton.widen import first_half, widened

NO_NORM, FOLDED, GAINED, NORMED, SUMMED = 0, 1, 2, 3, 4
SQUARES = tl.constexpr(16)  # values whose squares are added up by the kernel that writes them

# Programmatic dependent launch (Hopper and later): a kernel's programs start while the previous kernel still runs and
# wait for it before they read what it wrote; with PDL_PREFETCH they ask for their weights before they wait.
NO_PDL, PDL, PDL_PREFETCH = 0, 1, 2


PLAIN, INT4, INT8, FP8, INT4_WHOLE = 0, 1, 2, 3, 4  # FORMAT of a weight; the last: with whole numbers for zeros
FORMATS = {"int4": INT4, "int8": INT8, "fp8": FP8}


class WeightArguments(NamedTuple):
    """What a kernel is told of a weight."""

    stored: Tensor
    scales: Tensor  # any tensor for a plain weight
    format: int
    group: int


def weight_arguments(weight: Weight) -> WeightArguments:
    if isinstance(weight, PackedWeight):
        form = INT4_WHOLE if weight.scales_sums else FORMATS[weight.kind]
        return WeightArguments(weight.words, weight.scales, form, weight.group)
    return WeightArguments(weight, weight, PLAIN, 0)


class NormArguments(NamedTuple):
    """What a kernel is told of the norm before its product."""

    stream: Tensor
    mode: int


def norm_arguments(
    x: Tensor, stream: Tensor | None, scales: Tensor | None = None, squares: Tensor | None = None
) -> NormArguments:
    if stream is None:
        return NormArguments(x, NO_NORM)
    if squares is not None:
        return NormArguments(squares, SUMMED)
    if scales is not None:
        return NormArguments(scales, NORMED)
    return NormArguments(stream, FOLDED if stream is x else GAINED)


@triton.jit
def row_sums(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS] sums of [ROWS, SIZE], SIZE a power of two up to 4,096. Always of two values at a time, so that their order
    is not the compiler's: that of `tl.sum` over more follows from how a tile lies in registers."""
    for step in tl.static_range(12):
        if (SIZE >> step) > 1:
            values = tl.sum(tl.reshape(values, (ROWS, 2, SIZE >> (step + 1))), axis=1)
    return tl.reshape(values, (ROWS,))


@triton.constexpr_function
def _parts(FORMAT):
    """Values of a stored word."""
    return {0: 1, 1: 4, 4: 4}.get(FORMAT, 2)


@triton.jit
def diagonal(square, SIZE: tl.constexpr):
    """[SIZE] of [SIZE, SIZE]. Each sum has one value that is not zero, so its order does not show."""
    places = tl.arange(0, SIZE)
    return tl.sum(tl.where(places[:, None] == places[None, :], square, 0.0), axis=1)


@triton.jit
def product(
    x, rows, row_ok, stream, eps, weight, scales, outs, out_ok, num_out, begin,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    OUTS_FIRST: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """[ROWS, OUT] float32: these rows of x times rows `outs` of the weight, over inputs [begin, begin + SPAN)."""
    parts: tl.constexpr = _parts(FORMAT)
    step: tl.constexpr = IN * parts  # inputs
    width: tl.constexpr = K if FORMAT == 0 else (K + step - 1) // step * IN  # of a stored row
    whole: tl.constexpr = K % SPAN == 0 and SPAN % step == 0  # no step reaches past the end
    precision: tl.constexpr = "ieee" if EXACT else "tf32"  # float32 must not pass through TF32, which keeps ten bits
    one_group: tl.constexpr = GROUP >= K
    scales_steps: tl.constexpr = FORMAT == 4 and not one_group and GROUP % step == 0
    # Where inputs stand in a tile of rows and in one of the weight
    x_axis: tl.constexpr = 0 if OUTS_FIRST else 1
    w_axis: tl.constexpr = 1 if OUTS_FIRST else 0
    ins = tl.arange(0, IN)
    x_ins, w_ins = tl.expand_dims(ins, 1 - x_axis), tl.expand_dims(ins, 1 - w_axis)
    some_rows, some_outs = tl.expand_dims(row_ok, x_axis), tl.expand_dims(out_ok, w_axis)
    x_at = tl.expand_dims(rows.to(tl.int64), x_axis) * K + begin + x_ins
    w_at = weight + tl.expand_dims(outs.to(tl.int64), w_axis) * width + begin // parts + w_ins
    squares = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    total = tl.zeros((OUT, ROWS) if OUTS_FIRST else (ROWS, OUT), dtype=tl.float32)
    if NORM == 4:  # read early, so that it does not delay the end
        groups: tl.constexpr = (K + SQUARES - 1) // SQUARES
        padded: tl.constexpr = triton.next_power_of_2(groups)
        group = tl.arange(0, padded)
        squares_at = stream + rows.to(tl.int64)[:, None] * groups + group[None, :]
        summed = tl.load(squares_at, mask=row_ok[:, None] & (group < groups)[None, :], other=0.0)
        row_scale = tl.rsqrt(row_sums(summed, ROWS, padded) / K + eps)
    if FORMAT > 0 and one_group:
        pair = tl.expand_dims(tl.load(scales + num_out + outs, mask=out_ok, other=0), w_axis)
    for start in range(0, SPAN, step):
        w_left = width - (begin + start) // parts
        w_ok = some_outs if whole else some_outs & (w_ins < w_left)
        stored = tl.load(w_at + start // parts, mask=w_ok, other=0)
        made = tl.zeros_like(total)  # of this step; only where its sum is scaled
        for part in tl.static_range(parts):
            at = start + part * IN
            x_ok = some_rows if whole else some_rows & (x_ins < K - begin - at)
            x_tile = tl.load(x + x_at + at, mask=x_ok, other=0.0)
            if FORMAT == 0:
                w_tile = stored
            else:
                if not one_group and (part == 0 or not scales_steps):
                    pair_at = (1 + (begin + at) // GROUP) * num_out + outs
                    if not whole:  # padding meets rows of zeros: any scale will do
                        pair_at = tl.minimum(pair_at, K // GROUP * num_out + outs)
                    pair = tl.expand_dims(tl.load(scales + pair_at, mask=out_ok, other=0), w_axis)
                w_tile = widened(stored, pair, part, FORMAT, one_group, x.dtype.element_ty)
            x_tile = x_tile.to(w_tile.dtype)
            if NORM == 1:
                squares = _add_squares(squares, x_tile, OUTS_FIRST, precision)
            if NORM == 2:
                s_tile = tl.load(stream + x_at + at, mask=x_ok, other=0.0)
                squares = _add_squares(squares, s_tile, OUTS_FIRST, precision)
            if FORMAT == 4 and not one_group:
                made = _add_product(made, x_tile, w_tile, OUTS_FIRST, precision)
                if part == parts - 1 or not scales_steps:
                    total = tl.fma(made, first_half(pair), total)
                    made = tl.zeros_like(total)
            else:
                total = _add_product(total, x_tile, w_tile, OUTS_FIRST, precision)
    if OUTS_FIRST:
        total = tl.trans(total)
    if FORMAT > 0:
        total *= tl.load(scales + outs, mask=out_ok, other=0).to(tl.float32, bitcast=True)[None, :]
    if NORM == 1 or NORM == 2:
        total *= tl.rsqrt(diagonal(squares, ROWS) / K + eps)[:, None]
    if NORM == 3:
        total *= tl.load(stream + rows, mask=row_ok, other=0.0)[:, None]
    if NORM == 4:
        total *= row_scale[:, None]
    return total


@triton.jit
def _add_product(total, x_tile, w_tile, OUTS_FIRST: tl.constexpr, precision: tl.constexpr):
    if OUTS_FIRST:
        total = tl.dot(w_tile, x_tile, total, input_precision=precision)
    else:
        total = tl.dot(x_tile, w_tile, total, input_precision=precision)
    return total


@triton.jit
def _add_squares(squares, x_tile, OUTS_FIRST: tl.constexpr, precision: tl.constexpr):
    if OUTS_FIRST:
        squares = tl.dot(tl.trans(x_tile), x_tile, squares, input_precision=precision)
    else:
        squares = tl.dot(x_tile, tl.trans(x_tile), squares, input_precision=precision)
    return squares


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """With programmatic dependent launch: let the next kernel start, and wait for what the previous one wrote."""
    if PDL > 0:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_weights(
    weight, outs, num_out, begin, K: tl.constexpr, SPAN: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Ask for rows `outs` of the weight, inputs [begin, begin + SPAN), to be brought into the L2 cache."""
    if PDL == 2:
        parts: tl.constexpr = _parts(FORMAT)
        width: tl.constexpr = K if FORMAT == 0 else (K + IN * parts - 1) // (IN * parts) * IN
        line: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)  # elements of a cache line
        lines: tl.constexpr = triton.next_power_of_2((SPAN // parts + line - 1) // line)
        at = tl.minimum(begin // parts + tl.arange(0, lines) * line, width - 1)
        rows = tl.minimum(outs, num_out - 1).to(tl.int64)
        addresses = (weight + rows[:, None] * width + at[None, :]).to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )
