"""RMSNorm apart from the product that follows, for passes of many rows.

Inside a product every program norms its rows again, and the sum of squares takes the registers of a larger tile. For
few rows that is cheaper than one kernel more; for many it is not. The bits are those of the norm inside the product
(product.py): squares are added up in the same order.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.product import NO_PDL, norm_mode, row_sums, wait_for_previous_kernel
from paceline.ops.triton.tiles import ROWS, Tile


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows_kernel(
    x, norm, gained, scales, num_rows, eps,
    K: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ins = tl.arange(0, IN)
    row_ok = rows < num_rows
    at = rows.to(tl.int64)[:, None] * K + ins[None, :]
    squares = tl.zeros((ROWS, IN), dtype=tl.float32)
    for start in range(0, K, IN):
        ok = row_ok[:, None] & (start + ins < K)[None, :]
        stored = tl.load(x + at + start, mask=ok, other=0.0)
        wide = stored.to(tl.float32)
        squares += wide * wide
        if NORM == 1:
            gain = tl.load(norm + start + ins, mask=start + ins < K, other=0.0)[None, :].to(tl.float32)
            tl.store(gained + at + start, (wide * gain).to(stored.dtype), mask=ok)
    scale = tl.rsqrt(row_sums(squares, ROWS, IN) / K + eps)
    if NORM == 1:
        tl.store(scales + rows, scale, mask=row_ok)
    else:
        for start in range(0, K, IN):
            ok = row_ok[:, None] & (start + ins < K)[None, :]
            stored = tl.load(x + at + start, mask=ok, other=0.0)
            gain = tl.load(norm + start + ins, mask=start + ins < K, other=0.0)[None, :]
            tl.store(gained + at + start, (stored.to(tl.float32) * scale[:, None]).to(stored.dtype) * gain, mask=ok)
        tl.store(scales + rows, scale * 0.0 + 1.0, mask=row_ok)


def norm_rows(
    x: Tensor,  # [rows, size]
    norm: Tensor,  # [size]
    gained: Tensor,  # [rows, size]: written, what the product multiplies
    scales: Tensor,  # [rows] float32: written, what it scales the finished sum with
    eps: float,
    tile: Tile,  # of the product with the norm inside
    *,
    pdl: int = NO_PDL,
) -> None:
    num_rows, size = x.shape
    _norm_rows_kernel[(triton.cdiv(num_rows, ROWS),)](
        x, norm, gained, scales, num_rows, eps, K=size, NORM=norm_mode(x.dtype), ROWS=ROWS, IN=tile.into, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
