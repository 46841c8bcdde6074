"""RMSNorm, the gate and up product, and silu(gate) * up, in one kernel. Columns alternate between gate and up."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.packed import Weight
from paceline.ops.triton.product import (
    NO_PDL,
    norm_arguments,
    prefetch_weights,
    product,
    wait_for_previous_kernel,
    weight_arguments,
)
from paceline.ops.triton.tiles import ROWS, Tile


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    x, stream, weight, scales, bias, out, num_rows, size, eps,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, OUTS_FIRST: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    columns = tl.arange(0, OUT)
    column_pairs = tl.program_id(1) * (OUT // 2) + columns // 2
    outs = column_pairs + (columns % 2) * size  # gate, up, gate, up, ...
    out_ok = column_pairs < size
    prefetch_weights(weight, outs, 2 * size, 0, K, K, OUT, IN, FORMAT, PDL)
    wait_for_previous_kernel(PDL)
    made = product(
        x, rows, row_ok, stream, eps, weight, scales, outs, out_ok, 2 * size, 0, K, K, ROWS, OUT, IN, OUTS_FIRST,
        NORM, EXACT, FORMAT, GROUP,
    )  # fmt: skip
    if HAS_BIAS:
        made += tl.load(bias + outs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(made, (ROWS, OUT // 2, 2)))
    made = gate / (1.0 + tl.exp(-gate)) * up
    pairs = tl.program_id(1) * (OUT // 2) + tl.arange(0, OUT // 2)
    at = rows.to(tl.int64)[:, None] * size + pairs[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=row_ok[:, None] & (pairs < size)[None, :])


def norm_gate_up_silu(
    x: Tensor,  # [rows, hidden]
    stream: Tensor,  # [rows, hidden]: whose norm scales the product, see product.py
    weight: Weight,  # [2 * intermediate, hidden]: gate, then up
    bias: Tensor | None,
    out: Tensor,  # [rows, intermediate]: written
    eps: float,
    tile: Tile,
    *,
    scales: Tensor | None = None,  # [rows] float32, of scale_rows(): then the product does not find them itself
    squares: Tensor | None = None,  # [rows, num_squares(hidden)] float32, of linear_residual(): likewise
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    num_rows, num_in = x.shape
    norm, given = norm_arguments(x, stream, scales, squares), weight_arguments(weight)
    grid = (triton.cdiv(num_rows, row_tile), triton.cdiv(weight.shape[0], tile.out))
    _gate_up_kernel[grid](
        x, norm.stream, given.stored, given.scales, bias if bias is not None else x, out, num_rows,
        weight.shape[0] // 2, eps,
        K=num_in, HAS_BIAS=bias is not None, NORM=norm.mode, EXACT=weight.dtype == torch.float32,
        ROWS=row_tile, OUT=tile.out, IN=tile.into, OUTS_FIRST=tile.outs_first, FORMAT=given.format, GROUP=given.group,
        PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
