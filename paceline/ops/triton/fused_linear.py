"""A product added to the residual stream, in place: the output product of attention, and the MLP's down product; or
written instead of added, and over normed rows (`linear_rows`).

Where the weight has too few outputs to fill the GPU, several programs share a sum: each takes a fixed part of K, and
the one that finishes last adds the parts in order. Who was last does not show in the bits.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.packed import Weight
from paceline.ops.triton.product import (
    NO_NORM,
    NO_PDL,
    norm_mode,
    prefetch_weights,
    product,
    wait_for_previous_kernel,
    weight_arguments,
)
from paceline.ops.triton.tiles import ROWS, Tile

SPAN_UNIT = 512  # inputs: parts of K begin at multiples of it, so that a step may be shortened without moving them


@triton.jit
def _add_to_residual(hidden, bias, made, at, ok, outs, out_ok, HAS_BIAS: tl.constexpr, ADD: tl.constexpr):
    if HAS_BIAS:
        made += tl.load(bias + outs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
    if ADD:
        made += tl.load(hidden + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(hidden + at, made.to(hidden.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def _residual_kernel(
    x, norm, weight, scales, bias, hidden, parts, arrivals, num_rows, num_out, eps,
    K: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
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
        x, rows, row_ok, norm, eps, weight, scales, outs, out_ok, num_out, begin, K, SPAN, ROWS, OUT, IN, NORM, EXACT,
        FORMAT, GROUP,
    )  # fmt: skip
    if SPLITS == 1:
        _add_to_residual(hidden, bias, made, at, ok, outs, out_ok, HAS_BIAS, ADD)
    else:
        size = num_rows.to(tl.int64) * num_out
        tl.store(parts + tl.program_id(2) * size + at, made, mask=ok)
        tl.debug_barrier()  # all threads have written before one of them says so
        counter = arrivals + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) == SPLITS - 1:
            made = tl.load(parts + at, mask=ok, other=0.0, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                made += tl.load(parts + split * size + at, mask=ok, other=0.0, cache_modifier=".cg")
            _add_to_residual(hidden, bias, made, at, ok, outs, out_ok, HAS_BIAS, ADD)
            tl.store(counter, 0)  # ready for the next pass


def split_sizes(num_rows: int, num_out: int, tile: Tile) -> tuple[int, int]:
    """How many float32 `parts` and int32 `arrivals` (zeros) a split product needs for up to this many rows."""
    if tile.splits == 1:
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
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    _launch(x, None, weight, bias, hidden, parts, arrivals, 0.0, tile, add=True, pdl=pdl, row_tile=row_tile)


def linear_rows(
    x: Tensor,  # [rows, in]
    norm: Tensor | None,  # [in]: of the rows; then the tile must not be split
    weight: Weight,  # [out, in]
    bias: Tensor | None,
    out: Tensor,  # [rows, out]: written
    parts: Tensor,  # see split_sizes()
    arrivals: Tensor,
    eps: float,
    tile: Tile,
    *,
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    assert norm is None or tile.splits == 1, "a part of a row does not know the row's norm"
    _launch(x, norm, weight, bias, out, parts, arrivals, eps, tile, add=False, pdl=pdl, row_tile=row_tile)


def _launch(
    x: Tensor,
    norm: Tensor | None,
    weight: Weight,
    bias: Tensor | None,
    hidden: Tensor,
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
    grid = (triton.cdiv(num_rows, row_tile), triton.cdiv(num_out, tile.out), tile.splits)
    given = weight_arguments(weight)
    _residual_kernel[grid](
        x, norm if norm is not None else x, given.stored, given.scales, bias if bias is not None else x, hidden, parts,
        arrivals, num_rows, num_out, eps,
        K=num_in, SPAN=span, SPLITS=tile.splits, HAS_BIAS=bias is not None, ADD=add,
        NORM=norm_mode(weight.dtype) if norm is not None else NO_NORM, EXACT=weight.dtype == torch.float32,
        ROWS=row_tile, OUT=tile.out, IN=tile.into, FORMAT=given.format, GROUP=given.group, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
