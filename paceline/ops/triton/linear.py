"""Matrix product with one fixed tile and one fixed order of summation, so a row's bits never depend on its company.

Libraries choose another kernel, tile or split of the sum as the number of rows changes. Here every output tile, at
one row or at thousands, runs the same program: the whole of K from the front to the back into one accumulator.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_OUT = 64, 32
TILE_IN_BYTES = 256  # of a row, so that the tiles of a few loads in flight fit into shared memory in every dtype


@triton.jit
def _linear_kernel(
    x, weight, bias, y, num_rows, num_out, num_in,
    HAS_BIAS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUT + tl.arange(0, OUT)
    ins = tl.arange(0, IN)
    row_ok, out_ok = rows < num_rows, outs < num_out
    total = tl.zeros((ROWS, OUT), dtype=tl.float32)
    for start in range(0, num_in, IN):
        at = start + ins
        in_ok = at < num_in
        x_at = rows[:, None].to(tl.int64) * num_in + at[None, :]
        x_tile = tl.load(x + x_at, mask=row_ok[:, None] & in_ok[None, :], other=0.0)
        w_at = outs[None, :].to(tl.int64) * num_in + at[:, None]
        w_tile = tl.load(weight + w_at, mask=out_ok[None, :] & in_ok[:, None], other=0.0)
        # float32 must not pass through TF32, which keeps ten bits of it
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee" if EXACT else "tf32")
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
    y_at = rows[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(y + y_at, total.to(y.dtype.element_ty), mask=row_ok[:, None] & out_ok[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, in], weight: [out, in] -> [rows, out]"""
    x = x.contiguous()
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_out, TILE_OUT), triton.cdiv(num_rows, TILE_ROWS))
    _linear_kernel[grid](
        x, weight, bias if bias is not None else x, y, num_rows, num_out, num_in,
        HAS_BIAS=bias is not None, EXACT=x.dtype == torch.float32,
        ROWS=TILE_ROWS, OUT=TILE_OUT, IN=TILE_IN_BYTES // x.element_size(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
