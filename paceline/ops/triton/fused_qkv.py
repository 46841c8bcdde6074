"""RMSNorm (if any), the q, k and v product, bias, q/k norm, RoPE and the KV write, in one kernel.

A program makes pairs of outputs of one head: RoPE turns dimension i together with i + head_dim / 2, so columns
alternate between the two halves. With a norm on q and k a program takes a whole head. A row whose slot is negative
(padding) writes no keys and values.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.kv_tensor import FLOAT8, raw
from paceline.ops.packed import Weight
from paceline.ops.triton.float8 import narrowed
from paceline.ops.triton.product import (
    NO_PDL,
    norm_arguments,
    prefetch_weights,
    product,
    row_sums,
    wait_for_previous_kernel,
    weight_arguments,
)
from paceline.ops.triton.tiles import ROWS, Tile


@dataclass(frozen=True, slots=True)
class Heads:
    num_q: int
    num_kv: int
    dim: int


@triton.jit(do_not_specialize=["num_rows"])
def _qkv_kernel(
    x, stream, weight, scales, bias, head_norms, cos, sin, positions, slots, query, kv, num_rows, num_slots, eps,
    K: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, OUTS_FIRST: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, FLOAT8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    half: tl.constexpr = DIM // 2
    tiles: tl.constexpr = (DIM + OUT - 1) // OUT
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    columns = tl.arange(0, OUT)
    column_pairs = tile * (OUT // 2) + columns // 2
    outs = head * DIM + column_pairs + (columns % 2) * half  # first half, second half, first half, ...
    out_ok = column_pairs < half
    num_out: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * DIM
    prefetch_weights(weight, outs, num_out, 0, K, K, OUT, IN, FORMAT, PDL)
    wait_for_previous_kernel(PDL)
    dtype = query.dtype.element_ty
    made = product(
        x, rows, row_ok, stream, eps, weight, scales, outs, out_ok, num_out, 0, K, K, ROWS, OUT, IN, OUTS_FIRST,
        NORM, EXACT, FORMAT, GROUP,
    )  # fmt: skip
    if HAS_BIAS:
        made += tl.load(bias + outs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
    made = made.to(dtype).to(tl.float32)
    first, second = tl.split(tl.reshape(made, (ROWS, OUT // 2, 2)))  # each [ROWS, pairs]
    pairs = tile * (OUT // 2) + tl.arange(0, OUT // 2)
    pair_ok = (pairs < half)[None, :]
    turns = head < Q_HEADS + KV_HEADS  # values stay as they are
    turning = pairs < tl.where(turns, half, 0)

    if HEAD_NORM:
        gains = head_norms + (head >= Q_HEADS).to(tl.int32) * DIM + pairs
        mean = row_sums(first * first + second * second, ROWS, OUT // 2) / DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        first_gain = tl.load(gains, mask=turning, other=0.0)[None, :]
        second_gain = tl.load(gains + half, mask=turning, other=0.0)[None, :]
        first = tl.where(turns, ((first * scale).to(dtype) * first_gain).to(tl.float32), first)
        second = tl.where(turns, ((second * scale).to(dtype) * second_gain).to(tl.float32), second)

    position = tl.load(positions + rows, mask=row_ok, other=0).to(tl.int64)
    angle = position[:, None] * half + pairs[None, :]
    angle_ok = row_ok[:, None] & turning[None, :]
    c = tl.load(cos + angle, mask=angle_ok, other=1.0)
    s = tl.load(sin + angle, mask=angle_ok, other=0.0)
    turned_first = tl.where(turns, first * c - second * s, first).to(dtype)
    turned_second = tl.where(turns, second * c + first * s, second).to(dtype)

    ok = row_ok[:, None] & pair_ok
    if head < Q_HEADS:
        at = (rows.to(tl.int64)[:, None] * Q_HEADS + head) * DIM + pairs[None, :]
        tl.store(query + at, turned_first, mask=ok)
        tl.store(query + at + half, turned_second, mask=ok)
    else:
        kind, kv_head = (head - Q_HEADS) // KV_HEADS, (head - Q_HEADS) % KV_HEADS  # kind 0: keys, 1: values
        slot = tl.load(slots + rows, mask=row_ok, other=-1).to(tl.int64)
        ok = ok & (slot >= 0)[:, None]
        at = ((slot + kind.to(tl.int64) * num_slots)[:, None] * KV_HEADS + kv_head) * DIM + pairs[None, :]
        if FLOAT8:
            turned_first, turned_second = narrowed(turned_first), narrowed(turned_second)
        tl.store(kv + at, turned_first, mask=ok)
        tl.store(kv + at + half, turned_second, mask=ok)


def norm_qkv_rope(
    x: Tensor,  # [rows, hidden]
    stream: Tensor | None,  # [rows, hidden]: whose norm scales the product (see product.py); None: it is not scaled
    weight: Weight,  # [(q + 2 kv heads) * dim, hidden]
    bias: Tensor | None,
    head_norms: Tensor | None,  # [2, dim]: of q and of k
    cos: Tensor,  # [positions, dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [rows] int32
    slots: Tensor,  # [rows] int32; -1: not written
    query: Tensor,  # [rows, q heads, dim]: written
    kv_layer: Tensor,  # [2, slots, kv heads, dim], of the query's type or FLOAT8: rows `slots` are written
    heads: Heads,
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
    out = (
        triton.next_power_of_2(heads.dim)
        if head_norms is not None
        else min(tile.out, triton.next_power_of_2(heads.dim))
    )
    tiles = triton.cdiv(heads.dim, out)
    grid = (triton.cdiv(num_rows, row_tile), (heads.num_q + 2 * heads.num_kv) * tiles)
    _qkv_kernel[grid](
        x, norm.stream, given.stored, given.scales, bias if bias is not None else x,
        head_norms if head_norms is not None else x, cos, sin, positions, slots,
        query, raw(kv_layer), num_rows, kv_layer.shape[1], eps,
        K=num_in, Q_HEADS=heads.num_q, KV_HEADS=heads.num_kv, DIM=heads.dim,
        HAS_BIAS=bias is not None, HEAD_NORM=head_norms is not None, NORM=norm.mode,
        EXACT=weight.dtype == torch.float32, ROWS=row_tile, OUT=out, IN=tile.into, OUTS_FIRST=tile.outs_first,
        FORMAT=given.format, GROUP=given.group, FLOAT8=kv_layer.dtype == FLOAT8, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
