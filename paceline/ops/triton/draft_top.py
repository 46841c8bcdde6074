"""The likeliest tokens of each row of a drafter, with the target's noise where asked for: no logits go to memory.

A program of the head's product has some rows and a stretch of the vocabulary: it adds noise, and keeps of each row its
best scores, and the logarithm of the sum of their exponentials. A second kernel joins the stretches, one row a program.

A score and its id travel as one int64 that orders as (score, lower id first), so that one maximum finds both.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.noise import gumbel, uniform_of
from paceline.ops.triton.product import (
    FOLDED,
    NO_NORM,
    NO_PDL,
    prefetch_weights,
    product,
    wait_for_previous_kernel,
)
from paceline.ops.triton.tiles import ROWS, Tile

LEAST = tl.constexpr(-(2**63))  # below every score


class Noise(Protocol):
    @property
    def scales(self) -> Tensor: ...  # [R] float32: of logits that get noise; 0: none

    @property
    def noise_keys(self) -> Tensor: ...  # [R, L, 2] int32, with the stride of scales

    @property
    def id_constants(self) -> Tensor: ...  # [vocab] int32


@triton.jit
def _ordered(bits):
    """The bits of a float32 as an int32 that orders as the float does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _packed(scores, ids):
    high = _ordered(scores.to(tl.int32, bitcast=True)).to(tl.int64) << 32
    return high | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _score_of(packed):
    return _ordered((packed >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "rows_each", "level"])
def _head_kernel(
    x, weight, packed, sums, scales, keys, constants, num_rows, rows_each, level, record, vocab, eps,
    K: tl.constexpr, TOP: tl.constexpr, NORM: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    outs = tl.program_id(1) * OUT + tl.arange(0, OUT)
    out_ok = outs < vocab
    prefetch_weights(weight, outs, vocab, 0, K, K, OUT, IN, 0, PDL)
    wait_for_previous_kernel(PDL)
    scores = product(
        x, rows, row_ok, x, eps, weight, weight, outs, out_ok, 0, 0, K, K, ROWS, OUT, IN, False, NORM, EXACT, 0, 0
    )
    own = rows // rows_each * record
    scale = tl.load(scales + own, mask=row_ok, other=0.0)
    if tl.max(scale, axis=0) > 0.0:
        low = tl.load(keys + own + 2 * level, mask=row_ok, other=0)
        high = tl.load(keys + own + 2 * level + 1, mask=row_ok, other=0)
        constant = tl.load(constants + outs, mask=out_ok, other=0)
        noise = gumbel(uniform_of(constant[None, :], low[:, None], high[:, None]))
        scores = tl.where((scale > 0.0)[:, None], scores * scale[:, None] + noise, scores)
    scores = tl.where(out_ok[None, :] & (scores == scores), scores, float("-inf"))
    top = tl.max(scores, axis=1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + at, safe + tl.log(tl.sum(tl.exp(scores - safe[:, None]), axis=1)), mask=row_ok)
    left = tl.where(out_ok[None, :], _packed(scores, outs[None, :] + tl.zeros((ROWS, OUT), dtype=tl.int32)), LEAST)
    for i in range(TOP):
        best = tl.max(left, axis=1)
        tl.store(packed + at * TOP + i, best, mask=row_ok)
        left = tl.where(left == best[:, None], LEAST, left)


@triton.jit(do_not_specialize=["stretches"])
def _join_kernel(
    packed, sums, target_ids, ids, log_probs, stretches,
    TOP: tl.constexpr, STRETCHES: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, STRETCHES)
    part = tl.load(sums + row * stretches + parts, mask=parts < stretches, other=float("-inf"))
    top = tl.max(part, axis=0)
    total = top + tl.log(tl.sum(tl.exp(part - top), axis=0))
    places = tl.arange(0, CANDIDATES)
    left = tl.load(packed + row * stretches * TOP + places, mask=places < stretches * TOP, other=LEAST)
    for i in range(TOP):
        best = tl.max(left, axis=0)
        tl.store(log_probs + row * TOP + i, _score_of(best) - total)
        tl.store(ids + row * TOP + i, tl.load(target_ids + _id_of(best)))
        left = tl.where(left == best, LEAST, left)


def head_top(
    x: Tensor,  # [rows, hidden]: as many of each request, one after the other
    weight: Tensor,  # [vocab, hidden]
    noise: Noise,
    level: int,
    target_ids: Tensor,  # [vocab] int32: what ids of the head mean
    packed: Tensor,  # int64: room for rows * num_stretches() * k
    sums: Tensor,  # float32: room for rows * num_stretches()
    ids: Tensor,  # [rows, k] int32: written, likeliest first
    log_probs: Tensor,  # [rows, k] float32: written
    eps: float,
    tile: Tile,
    *,
    scaled: bool = False,  # by the rows' norm, whose gains the weight has
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    num_rows, (vocab, num_in), k = x.shape[0], weight.shape, ids.shape[1]
    stretches = num_stretches(vocab, tile)
    num_requests, record = noise.scales.shape[0], noise.scales.stride(0)
    assert k <= min(vocab, tile.out), "a stretch must have as many tokens as are asked for"
    _head_kernel[(triton.cdiv(num_rows, row_tile), stretches)](
        x, weight, packed, sums, noise.scales, noise.noise_keys, noise.id_constants,
        num_rows, num_rows // num_requests, level, record, vocab, eps,
        K=num_in, TOP=k, NORM=FOLDED if scaled else NO_NORM,
        EXACT=weight.dtype == torch.float32, ROWS=row_tile, OUT=tile.out, IN=tile.into, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
    _join_kernel[(num_rows,)](
        packed, sums, target_ids, ids, log_probs, stretches,
        TOP=k, STRETCHES=triton.next_power_of_2(stretches), CANDIDATES=triton.next_power_of_2(stretches * k), PDL=pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip


def num_stretches(vocab: int, tile: Tile) -> int:
    return -(-vocab // tile.out)
