"""RMSNorm beside a product instead of inside it.

`scale_rows` has the scales of rows for a product of many rows whose weight has the norm's gains in it: inside, every
program would find them again, at the cost of as much arithmetic as its product. The bits are those that the product
finds itself (`product.FOLDED`). `norm_wanted` norms the few rows whose logits are wanted, before the head: the head's
weight is often the embedding too, so it cannot have the gains in it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.product import NO_PDL, diagonal, wait_for_previous_kernel
from paceline.ops.triton.tiles import ROWS

INTO = 64  # inputs of a step; it does not show in the bits


@triton.jit(do_not_specialize=["num_rows"])
def _scale_rows_kernel(
    x, scales, num_rows, eps, K: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ins = tl.arange(0, IN)
    row_ok = rows < num_rows
    at = rows.to(tl.int64)[:, None] * K + ins[None, :]
    squares = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for start in range(0, K, IN):
        tile = tl.load(x + at + start, mask=row_ok[:, None] & (start + ins < K)[None, :], other=0.0)
        squares = tl.dot(tile, tl.trans(tile), squares, input_precision="ieee" if EXACT else "tf32")
    tl.store(scales + rows, tl.rsqrt(diagonal(squares, ROWS) / K + eps), mask=row_ok)


def scale_rows(
    x: Tensor,  # [rows, size]
    scales: Tensor,  # [rows] float32: written
    eps: float,
    *,
    pdl: int = NO_PDL,
) -> None:
    num_rows, size = x.shape
    _scale_rows_kernel[(triton.cdiv(num_rows, ROWS),)](
        x, scales, num_rows, eps, K=size, EXACT=x.dtype == torch.float32, ROWS=ROWS, IN=INTO, PDL=pdl,
        num_warps=2, num_stages=4, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip


@triton.jit
def _norm_wanted_kernel(
    x, wanted, gains, count, out, eps, COUNTED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    wait_for_previous_kernel(PDL)
    wants = place < tl.load(count) if COUNTED else True
    if wants:
        row = tl.load(wanted + place).to(tl.int64)
        at = tl.arange(0, BLOCK)
        stored = tl.load(x + row * K + at, mask=at < K, other=0.0)
        gain = tl.load(gains + at, mask=at < K, other=0.0).to(tl.float32)
        wide = stored.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
        tl.store(out + place.to(tl.int64) * K + at, (wide * scale * gain).to(out.dtype.element_ty), mask=at < K)


def norm_wanted(
    x: Tensor,  # [any, size]
    wanted: Tensor,  # [rows] int32: which rows of x
    gains: Tensor,  # [size]
    out: Tensor,  # [at least rows, size]: written
    eps: float,
    *,
    count: Tensor | None = None,  # [1] int32: only so many of `wanted`; None: all
    pdl: int = NO_PDL,
) -> None:
    size = x.shape[1]
    _norm_wanted_kernel[(wanted.shape[0],)](
        x, wanted, gains, wanted if count is None else count, out, eps, COUNTED=count is not None, K=size,
        BLOCK=triton.next_power_of_2(size), PDL=pdl, num_warps=4, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
