"""The sum that every fused kernel is built around: rows x outputs, K from front to back, in float32.

A row may be normed on the way (RMSNorm), in one of four ways:

- FOLDED: the weight has the norm's gains in it (`Decoder.fold_norms`), and the finished sum is scaled. The sum of a
  row's squares is the diagonal of rows times rows, a product with the bits and the speed of the other one.
- NORMED: the same, and norm_rows.py has found the scales already: `norm` has them.
- SCALE_LAST: the gains are applied to the row as it is read, the scale to the finished sum. Slower, because rows then
  pass through registers; for weights that cannot take the gains in.
- SCALE_FIRST: both are applied to the row before the product, which reads it twice and rounds as `reference.rms_norm`
  does. For float16, whose range a row with gains but without a scale may leave.

Rows may be wider than the weight: they are rounded to its type.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl

NO_NORM, SCALE_LAST, SCALE_FIRST, NORMED, FOLDED = 0, 1, 2, 3, 4

# Programmatic dependent launch (Hopper and later): a kernel's programs start while the previous kernel still runs and
# wait for it before they read what it wrote; with PDL_PREFETCH they ask for their weights before they wait.
NO_PDL, PDL, PDL_PREFETCH = 0, 1, 2


def norm_mode(dtype: torch.dtype) -> int:
    """`dtype`: the weight's"""
    return SCALE_FIRST if dtype == torch.float16 else SCALE_LAST


@triton.jit
def row_sums(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS] sums of [ROWS, SIZE], SIZE a power of two up to 4,096. Always of two values at a time, so that their order
    is not the compiler's: that of `tl.sum` over more follows from how a tile lies in registers."""
    for step in tl.static_range(12):
        if (SIZE >> step) > 1:
            values = tl.sum(tl.reshape(values, (ROWS, 2, SIZE >> (step + 1))), axis=1)
    return tl.reshape(values, (ROWS,))


@triton.jit
def diagonal(square, SIZE: tl.constexpr):
    """[SIZE] of [SIZE, SIZE]. Each sum has one value that is not zero, so its order does not show."""
    places = tl.arange(0, SIZE)
    return tl.sum(tl.where(places[:, None] == places[None, :], square, 0.0), axis=1)


@triton.jit
def product(
    x, x_rows, row_ok, norm, eps, weight, outs, out_ok, begin,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    NORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """[ROWS, OUT] float32: rows `x_rows` of x times rows `outs` of the weight, over inputs [begin, begin + SPAN)."""
    whole: tl.constexpr = K % SPAN == 0 and SPAN % IN == 0  # no step reaches past the end
    precision: tl.constexpr = "ieee" if EXACT else "tf32"  # float32 must not pass through TF32, which keeps ten bits
    ins = tl.arange(0, IN)
    x_at = x + x_rows.to(tl.int64)[:, None] * K + begin + ins[None, :]
    w_at = weight + outs.to(tl.int64)[None, :] * K + begin + ins[:, None]
    scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if NORM == 2:
        squares = tl.zeros((ROWS, IN), dtype=tl.float32)
        for start in range(0, K, IN):
            read = row_ok[:, None] if whole else row_ok[:, None] & (start + ins < K)[None, :]
            wide = tl.load(x_at + start, mask=read, other=0.0).to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(row_sums(squares, ROWS, IN) / K + eps)
    squares = tl.zeros((ROWS, ROWS if NORM == 4 else IN), dtype=tl.float32)
    total = tl.zeros((ROWS, OUT), dtype=tl.float32)
    for start in range(0, SPAN, IN):
        left = K - begin - start
        x_ok = row_ok[:, None] if whole else row_ok[:, None] & (ins < left)[None, :]
        w_ok = out_ok[None, :] if whole else out_ok[None, :] & (ins < left)[:, None]
        w_tile = tl.load(w_at + start, mask=w_ok, other=0.0)
        x_tile = tl.load(x_at + start, mask=x_ok, other=0.0)
        if NORM == 1 or NORM == 2:
            norm_tile = tl.load(norm + begin + start + ins, mask=ins < left, other=0.0)[None, :]
            if NORM == 1:
                wide = x_tile.to(tl.float32)
                squares += wide * wide
                x_tile = (wide * norm_tile.to(tl.float32)).to(w_tile.dtype)
            else:
                x_tile = (x_tile.to(tl.float32) * scale[:, None]).to(w_tile.dtype) * norm_tile
        x_tile = x_tile.to(w_tile.dtype)
        if NORM == 4:
            squares = tl.dot(x_tile, tl.trans(x_tile), squares, input_precision=precision)
        total = tl.dot(x_tile, w_tile, total, input_precision=precision)
    if NORM == 1:
        total *= tl.rsqrt(row_sums(squares, ROWS, IN) / K + eps)[:, None]
    if NORM == 4:
        total *= tl.rsqrt(diagonal(squares, ROWS) / K + eps)[:, None]
    if NORM == 3:
        total *= tl.load(norm + x_rows, mask=row_ok, other=0.0)[:, None]
    return total


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """With programmatic dependent launch: let the next kernel start, and wait for what the previous one wrote."""
    if PDL > 0:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_weights(
    weight, outs, num_out, begin, K: tl.constexpr, SPAN: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr
):
    """Ask for rows `outs` of the weight, inputs [begin, begin + SPAN), to be brought into the L2 cache."""
    if PDL == 2:
        line: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)  # inputs of a cache line
        lines: tl.constexpr = triton.next_power_of_2((SPAN + line - 1) // line)
        at = tl.minimum(begin + tl.arange(0, lines) * line, K - 1)
        rows = tl.minimum(outs, num_out - 1).to(tl.int64)
        addresses = (weight + rows[:, None] * K + at[None, :]).to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )
