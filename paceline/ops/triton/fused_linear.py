"""A product added to the residual stream, in place: the output product of attention, and the MLP's down product; or
written instead of added, and over scaled rows (`linear_rows`). The sum may also be written a second time, multiplied
with the gains of the norm behind it: for a product whose weight cannot take them in. And the squares of what is written
may be added up, 16 values at a time, for the scale of that norm (product.SUMMED).

Where the weight has too few outputs to fill the GPU, several programs share a sum: each takes a fixed part of K, and
the one that finishes last adds the parts in order. Who was last does not show in the bits. With many rows there are
programs enough: then one makes all parts, one after the other (ALONE), and adds them in the same order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.packed import Weight
from paceline.ops.triton.product import (
    NO_PDL,
    SQUARES,
    norm_arguments,
    prefetch_weights,
    product,
    row_sums,
    wait_for_previous_kernel,
    weight_arguments,
)
from paceline.ops.triton.tiles import ROWS, Tile

SPAN_UNIT = 256  # inputs: parts of K begin at multiples of it, so that a step may be shortened without moving them


@triton.jit
def _add_to_residual(
    hidden, bias, gains, gained, squares, made, at, ok, rows, row_ok, outs, out_ok, num_out,
    ROWS: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, GAINS: tl.constexpr,
    SQUARED: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        made += tl.load(bias + outs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
    if ADD:
        made += tl.load(hidden + at, mask=ok, other=0.0).to(tl.float32)
    made = made.to(hidden.dtype.element_ty)
    tl.store(hidden + at, made, mask=ok)
    if GAINS:
        gain = tl.load(gains + outs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
        tl.store(gained + at, (made.to(tl.float32) * gain).to(gained.dtype.element_ty), mask=ok)
    if SQUARED:
        wide = tl.where(out_ok[None, :], made.to(tl.float32), 0.0)
        groups: tl.constexpr = OUT // SQUARES
        sums = row_sums(tl.reshape(wide * wide, (ROWS * groups, SQUARES)), ROWS * groups, SQUARES)
        group = tl.program_id(1) * groups + tl.arange(0, groups)
        width = tl.cdiv(num_out, SQUARES)
        where = squares + rows.to(tl.int64)[:, None] * width + group[None, :]
        tl.store(where, tl.reshape(sums, (ROWS, groups)), mask=row_ok[:, None] & (group < width)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _residual_kernel(
    x, stream, weight, scales, bias, hidden, gains, gained, squares, parts, arrivals, num_rows, num_out, eps,
    K: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, ALONE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr, GAINS: tl.constexpr, SQUARED: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, OUTS_FIRST: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUT + tl.arange(0, OUT)
    row_ok, out_ok = rows < num_rows, outs < num_out
    ok = row_ok[:, None] & out_ok[None, :]
    at = rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    begin = tl.program_id(2) * SPAN
    prefetch_weights(weight, outs, num_out, begin, K, SPAN, OUT, IN, FORMAT, PDL)
    wait_for_previous_kernel(PDL)
    made = product(
        x, rows, row_ok, stream, eps, weight, scales, outs, out_ok, num_out, begin, K, SPAN, ROWS, OUT, IN, OUTS_FIRST,
        NORM, EXACT, FORMAT, GROUP,
    )  # fmt: skip
    if ALONE:
        for split in range(1, SPLITS):
            made += product(
                x, rows, row_ok, stream, eps, weight, scales, outs, out_ok, num_out, split * SPAN, K, SPAN, ROWS, OUT,
                IN, OUTS_FIRST, NORM, EXACT, FORMAT, GROUP,
            )  # fmt: skip
    if SPLITS == 1 or ALONE:
        _add_to_residual(
            hidden, bias, gains, gained, squares, made, at, ok, rows, row_ok, outs, out_ok, num_out,
            ROWS, OUT, HAS_BIAS, ADD, GAINS, SQUARED,
        )  # fmt: skip
    else:
        size = num_rows.to(tl.int64) * num_out
        tl.store(parts + tl.program_id(2) * size + at, made, mask=ok)
        tl.debug_barrier()  # all threads have written before one of them says so
        counter = arrivals + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) == SPLITS - 1:
            made = tl.load(parts + at, mask=ok, other=0.0, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                made += tl.load(parts + split * size + at, mask=ok, other=0.0, cache_modifier=".cg")
            _add_to_residual(
                hidden, bias, gains, gained, squares, made, at, ok, rows, row_ok, outs, out_ok, num_out,
                ROWS, OUT, HAS_BIAS, ADD, GAINS, SQUARED,
            )  # fmt: skip
            tl.store(counter, 0)  # ready for the next pass


def num_squares(num_out: int) -> int:
    return -(-num_out // int(SQUARES.value))


def split_sizes(num_rows: int, num_out: int, tile: Tile) -> tuple[int, int]:
    """How many float32 `parts` and int32 `arrivals` (zeros) a split product needs for up to this many rows."""
    if tile.splits == 1 or tile.alone:
        return 1, 1
    return tile.splits * num_rows * num_out, triton.cdiv(num_rows, ROWS) * triton.cdiv(num_out, tile.out)


def linear_residual(
    x: Tensor,  # [rows, in]
    weight: Weight,  # [out, in]
    bias: Tensor | None,
    hidden: Tensor,  # [rows, out]: the product is added to it
    parts: Tensor,  # see split_sizes()
    arrivals: Tensor,
    tile: Tile,
    *,
    gains: Tensor | None = None,  # [out]: then `gained` is written, what is in `hidden` now times the gains
    gained: Tensor | None = None,  # [rows, out]
    squares: Tensor | None = None,  # [rows, num_squares(out)] float32: then it is written
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    _launch(
        x, None, weight, bias, hidden, gains, gained, squares, parts, arrivals, 0.0, tile, add=True, pdl=pdl,
        row_tile=row_tile,
    )  # fmt: skip


def linear_rows(
    x: Tensor,  # [rows, in]
    weight: Weight,  # [out, in]
    bias: Tensor | None,
    out: Tensor,  # [rows, out]: written
    parts: Tensor,  # see split_sizes()
    arrivals: Tensor,
    eps: float,
    tile: Tile,
    *,
    scaled: bool = False,  # by the rows' norm, whose gains the weight has; then the tile must not be split
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    assert not scaled or tile.splits == 1, "a part of a row does not know the row's scale"
    stream = x if scaled else None
    _launch(
        x, stream, weight, bias, out, None, None, None, parts, arrivals, eps, tile, add=False, pdl=pdl,
        row_tile=row_tile,
    )  # fmt: skip


def _launch(
    x: Tensor,
    stream: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    hidden: Tensor,
    gains: Tensor | None,
    gained: Tensor | None,
    squares: Tensor | None,
    parts: Tensor,
    arrivals: Tensor,
    eps: float,
    tile: Tile,
    *,
    add: bool,
    pdl: int,
    row_tile: int,
) -> None:
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    span = num_in if tile.splits == 1 else triton.cdiv(triton.cdiv(num_in, SPAN_UNIT), tile.splits) * SPAN_UNIT
    alone = tile.alone and tile.splits > 1
    grid = (triton.cdiv(num_rows, row_tile), triton.cdiv(num_out, tile.out), 1 if alone else tile.splits)
    norm, given = norm_arguments(x, stream), weight_arguments(weight)
    _residual_kernel[grid](
        x, norm.stream, given.stored, given.scales, bias if bias is not None else x, hidden,
        gains if gains is not None else x, gained if gained is not None else x,
        squares if squares is not None else x, parts, arrivals, num_rows, num_out, eps,
        K=num_in, SPAN=span, SPLITS=tile.splits, ALONE=alone, HAS_BIAS=bias is not None, ADD=add,
        GAINS=gains is not None, SQUARED=squares is not None, NORM=norm.mode, EXACT=weight.dtype == torch.float32,
        ROWS=row_tile, OUT=tile.out, IN=tile.into, OUTS_FIRST=tile.outs_first, FORMAT=given.format, GROUP=given.group,
        PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
