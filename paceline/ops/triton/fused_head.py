"""The head's product over normed rows (norm_rows.norm_wanted): logits in float32, or only each row's token.

The second never writes the logits: a program keeps the best score of its share of the vocabulary, and a small kernel
takes the best of those, the lowest id where scores tie. A row with a temperature gets Gumbel noise keyed by its seed
and position, as in ops/random.py. NaN counts as infinity, so that a row that cannot be sampled shows in its score.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.packed import Weight
from paceline.ops.random import Purpose
from paceline.ops.triton.noise import gumbel, keyed_uniform, noise_key
from paceline.ops.triton.product import NO_PDL, prefetch_weights, product, wait_for_previous_kernel, weight_arguments
from paceline.ops.triton.tiles import ROWS, Tile


@dataclass(frozen=True, slots=True)
class RowNoise:
    temperatures: Tensor  # [rows] float32; 0: greedy
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int32: of the token that is drawn


@triton.jit
def _head_tile(
    x, weight, scales, logits, scores, ids, temperatures, seeds, positions, outs, num_rows, vocab,
    K: tl.constexpr, PICK: tl.constexpr, NOISE: tl.constexpr, PURPOSE: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, OUTS_FIRST: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok, out_ok = rows < num_rows, outs < vocab
    made = product(
        x, rows, row_ok, x, 0.0, weight, scales, outs, out_ok, vocab, 0, K, K, ROWS, OUT, IN, OUTS_FIRST, 0, EXACT,
        FORMAT, GROUP,
    )  # fmt: skip
    if PICK:
        if NOISE:
            temperature = tl.load(temperatures + rows, mask=row_ok, other=0.0)
            if tl.max(temperature, axis=0) > 0.0:
                seed = tl.load(seeds + rows, mask=row_ok, other=0)
                key = noise_key(seed, tl.load(positions + rows, mask=row_ok, other=0), PURPOSE)
                warm = (temperature > 0.0)[:, None]
                noisy = made / tl.where(warm, temperature[:, None], 1.0) + gumbel(keyed_uniform(key, outs))
                made = tl.where(warm, noisy, made)
        made = tl.where(made != made, float("inf"), made)
        made = tl.where(out_ok[None, :], made, float("-inf"))
        best = tl.max(made, axis=1)
        token = tl.min(tl.where(made == best[:, None], outs[None, :], 2147483647), axis=1)
        at = rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(scores + at, best, mask=row_ok)
        tl.store(ids + at, token, mask=row_ok)
    else:
        at = rows.to(tl.int64)[:, None] * vocab + outs[None, :]
        tl.store(logits + at, made, mask=row_ok[:, None] & out_ok[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _head_kernel(
    x, weight, scales, logits, scores, ids, temperatures, seeds, positions, count, num_rows, vocab,
    COUNTED: tl.constexpr, K: tl.constexpr, PICK: tl.constexpr, NOISE: tl.constexpr, PURPOSE: tl.constexpr,
    EXACT: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    OUTS_FIRST: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(1) * OUT + tl.arange(0, OUT)
    if COUNTED:
        num_rows = tl.minimum(num_rows, tl.load(count))  # sent before the pass: no kernel of it writes the number
    some = tl.program_id(0) * ROWS < num_rows
    if some:
        prefetch_weights(weight, outs, vocab, 0, K, K, OUT, IN, FORMAT, PDL)
    wait_for_previous_kernel(PDL)
    if some:
        _head_tile(
            x, weight, scales, logits, scores, ids, temperatures, seeds, positions, outs, num_rows, vocab,
            K, PICK, NOISE, PURPOSE, EXACT, ROWS, OUT, IN, OUTS_FIRST, FORMAT, GROUP,
        )  # fmt: skip


@triton.jit
def _pick_kernel(scores, ids, tokens, token_scores, num_tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    score = tl.load(scores + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    token = tl.load(ids + row * num_tiles + tiles, mask=tiles < num_tiles, other=2147483647)
    best = tl.max(score, axis=0)
    tl.store(tokens + row, tl.min(tl.where(score == best, token, 2147483647), axis=0))
    tl.store(token_scores + row, best)


def head_logits(
    x: Tensor,  # [rows, hidden]
    weight: Weight,  # [vocab, hidden]
    logits: Tensor,  # [rows, vocab] float32: written
    tile: Tile,
    *,
    count: Tensor | None = None,  # [1] int32: only so many rows are computed; None: all
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    num_rows, (vocab, num_in), given = x.shape[0], weight.shape, weight_arguments(weight)
    grid = (triton.cdiv(num_rows, row_tile), triton.cdiv(vocab, tile.out))
    _head_kernel[grid](
        x, given.stored, given.scales, logits, x, x, x, x, x, x if count is None else count, num_rows, vocab,
        COUNTED=count is not None, K=num_in, PICK=False, NOISE=False, PURPOSE=0, EXACT=x.dtype == torch.float32,
        ROWS=row_tile, OUT=tile.out, IN=tile.into, OUTS_FIRST=tile.outs_first, FORMAT=given.format, GROUP=given.group,
        PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip


def head_tokens(
    x: Tensor,  # [rows, hidden]
    weight: Weight,  # [vocab, hidden]
    scores: Tensor,  # [rows, head_tiles()] float32: room for the best of each share of the vocabulary
    ids: Tensor,  # [rows, head_tiles()] int32
    tokens: Tensor,  # [rows] int32: written
    token_scores: Tensor,  # [rows] float32: written; not finite where a row cannot be sampled
    noise: RowNoise | None,
    tile: Tile,
    *,
    count: Tensor | None = None,  # [1] int32: only so many rows are computed; None: all
    pdl: int = NO_PDL,
    row_tile: int = ROWS,
) -> None:
    num_rows, (vocab, num_in), given = x.shape[0], weight.shape, weight_arguments(weight)
    num_tiles = head_tiles(vocab, tile)
    _head_kernel[(triton.cdiv(num_rows, row_tile), num_tiles)](
        x, given.stored, given.scales, x, scores, ids,
        noise.temperatures if noise is not None else x, noise.seeds if noise is not None else x,
        noise.positions if noise is not None else x, x if count is None else count, num_rows, vocab,
        COUNTED=count is not None, K=num_in, PICK=True, NOISE=noise is not None, PURPOSE=int(Purpose.SAMPLE),
        EXACT=x.dtype == torch.float32, ROWS=row_tile, OUT=tile.out, IN=tile.into, OUTS_FIRST=tile.outs_first,
        FORMAT=given.format, GROUP=given.group, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        scores, ids, tokens, token_scores, num_tiles, TILES=triton.next_power_of_2(num_tiles), PDL=pdl,
        num_warps=4, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip


def head_tiles(vocab: int, tile: Tile) -> int:
    return -(-vocab // tile.out)
