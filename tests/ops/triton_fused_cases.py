"""What the fused Triton kernels must hold, at small sizes. Run by test_triton_fused.py in a process of its own: in
Triton's interpreter on a CPU (float32 and float16; it has no arithmetic for bfloat16), or on a GPU.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.forward import TokenDraws
from paceline.core.tree import DraftTree
from paceline.models.captured_passes import CapturedPasses
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.fused_cuts import Cuts
from paceline.models.fused_decoder import FusedDecoder
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.plain_passes import advance_views
from paceline.models.static_inputs import PassRoom, StaticInputs
from paceline.ops import fused_reference
from paceline.ops.random import Purpose, keyed_uniform, noise_key
from paceline.ops.triton import noise as triton_noise
from paceline.ops.triton.advance import RowInputs, advance_rows
from paceline.ops.triton.embed import DrawnBefore, embed_rows
from paceline.ops.triton.fused_head import RowNoise, head_logits, head_tiles, head_tokens
from paceline.ops.triton.fused_linear import linear_residual, num_squares, split_sizes
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.norm_rows import norm_wanted, scale_rows
from paceline.ops.triton.tiles import Cut, Tile
from tests.forward_batches import Pool, Rows
from tests.models.small_models import hf_config_dict, random_weights

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative to the largest output
COMPANIES = [1, 2, 16, 17, 33]
HIDDEN, OUTPUTS, EPS = 80, 48, 1e-5
TILE = Tile(out=16, into=32, warps=2, stages=3)
HEADS = Heads(num_q=3, num_kv=1, dim=16)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    worst = (found.float() - expected.float()).abs().max().item()
    assert worst <= TOLERANCE[dtype] * max(1.0, expected.float().abs().max().item())


# One function per kernel: rows of x -> everything that the kernel writes for them.


FEW_ROWS, WIDE_TILE = Cut(16, TILE), Tile(out=32, into=16, warps=2, stages=3)


def run_qkv(
    x: Tensor, *, bias: bool = True, head_norm: bool = False, gained: bool = False, cut: Cut = FEW_ROWS,
    scales: Tensor | None = None, squares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gained`: the rows have the norm's gains, as before a packed weight; else the weight has them"""
    num_rows, dtype = len(x), x.dtype
    query = torch.zeros(num_rows, HEADS.num_q, HEADS.dim, dtype=dtype, device=DEVICE)
    kv = torch.zeros(2, 2 * num_rows, HEADS.num_kv, HEADS.dim, dtype=dtype, device=DEVICE)
    norm, weight, *others = arguments = qkv_arguments(num_rows, dtype, bias, head_norm)
    rows, weight = (with_gains(x, norm), weight) if gained else (x, with_gains(weight, norm))
    norm_qkv_rope(
        rows, x, weight, *others, query, kv, HEADS, EPS, cut.tile, scales=scales, squares=squares, row_tile=cut.rows
    )  # fmt: skip
    own = kv[:, arguments[-1].long()]
    assert kv.count_nonzero() == own.count_nonzero(), "a slot of nobody was written"
    return torch.cat([query.flatten(1), own[0].flatten(1), own[1].flatten(1)], dim=1)


def qkv_arguments(num_rows: int, dtype: torch.dtype, bias: bool, head_norm: bool) -> tuple[Tensor, ...]:
    size = (HEADS.num_q + 2 * HEADS.num_kv) * HEADS.dim
    angles = random(50, HEADS.dim // 2, seed=5)
    return (
        1.0 + 0.2 * random(HIDDEN, seed=1, dtype=dtype),
        random(size, HIDDEN, seed=2, dtype=dtype),
        random(size, seed=3, dtype=dtype) if bias else None,
        1.0 + 0.2 * random(2, HEADS.dim, seed=4, dtype=dtype) if head_norm else None,
        angles.cos(),
        angles.sin(),
        ints([7 + row % 5 if row < num_rows - 1 else 9 for row in range(num_rows)]),
        ints([2 * num_rows - 1 - 2 * row for row in range(num_rows)]),
    )  # type: ignore[return-value]


def run_residual(
    x: Tensor, *, splits: int = 1, bias: bool = True, cut: Cut | None = None, squares: Tensor | None = None
) -> Tensor:
    tile, row_tile = (Tile(16, 32, 2, 3, splits), 16) if cut is None else (cut.tile, cut.rows)
    num_parts, num_arrivals = split_sizes(len(x), OUTPUTS, tile)
    parts = torch.full((num_parts,), torch.nan, device=DEVICE)
    arrivals = torch.zeros(num_arrivals, dtype=torch.int32, device=DEVICE)
    hidden = x[:, :OUTPUTS].clone()
    weight = random(OUTPUTS, x.shape[1], seed=6, dtype=x.dtype)
    bias_row = random(OUTPUTS, seed=7, dtype=x.dtype) if bias else None
    linear_residual(x, weight, bias_row, hidden, parts, arrivals, tile, squares=squares, row_tile=row_tile)
    assert not arrivals.any(), "the counters are not ready for the next pass"
    return hidden


def run_gate_up(
    x: Tensor, *, bias: bool = True, gained: bool = False, cut: Cut = FEW_ROWS, scales: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.zeros(len(x), OUTPUTS // 2, dtype=x.dtype, device=DEVICE)
    norm, weight, bias_row = gate_up_arguments(x.dtype, bias)
    rows, weight = (with_gains(x, norm), weight) if gained else (x, with_gains(weight, norm))
    norm_gate_up_silu(
        rows, x, weight, bias_row, out, EPS, cut.tile, scales=scales, squares=squares, row_tile=cut.rows
    )  # fmt: skip
    return out


def with_gains(rows: Tensor, gains: Tensor) -> Tensor:
    return (rows.float() * gains.float()).to(rows.dtype)


def gate_up_arguments(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    return (
        1.0 + 0.2 * random(HIDDEN, seed=8, dtype=dtype),
        0.3 * random(OUTPUTS, HIDDEN, seed=9, dtype=dtype),
        random(OUTPUTS, seed=10, dtype=dtype) if bias else None,
    )


def run_logits(x: Tensor) -> Tensor:
    logits = torch.zeros(len(x), OUTPUTS, device=DEVICE)
    norm, weight, _ = gate_up_arguments(x.dtype, False)
    head_logits(normed(x, norm), weight, logits, TILE)
    return logits


def normed(x: Tensor, norm: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    norm_wanted(x, ints(list(range(len(x)))), norm, out, EPS)
    return out


def run_tokens(x: Tensor, noise: RowNoise | None = None, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_rows, shares = len(x), head_tiles(OUTPUTS, TILE)
    scores = torch.zeros(num_rows, shares, device=DEVICE)
    ids = torch.zeros(num_rows, shares, dtype=torch.int32, device=DEVICE)
    tokens, best = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE), torch.zeros(num_rows, device=DEVICE)
    norm, head, _ = gate_up_arguments(x.dtype, False)
    head = head if weight is None else weight
    head_tokens(normed(x, norm), head, scores, ids, tokens, best, noise, TILE)
    return tokens, best


def test_rows_that_go_on_do_so_as_those_of_the_twin() -> None:
    kv = torch.zeros(1, 2, 4 * 6 * 4, 1, 1)
    room = PassRoom(kv, 4, max_blocks=6, max_num_seqs=4)
    views = StaticInputs(room, 8, torch.device("cpu")).views(8)
    views.fill_with_padding()
    for array, values in (
        (views.positions, [3, 6, 0]),
        (views.slots, [11, 30, 40]),
        (views.context_lens, [4, 7, 1]),
        (views.draw_positions, [4, 7, 1]),
        (views.req_ids, [0, 1, 2]),
        (views.counts, [3, 3, 3]),
    ):
        array[:3] = ints(values).cpu()
    views.block_tables[:3] = ints(list(range(2, 20))).cpu().view(3, 6)
    names = ("positions", "slots", "context_lens", "follows", "draw_positions", "req_ids", "counts", "block_tables")
    moved = RowInputs(*(getattr(views, name).clone().to(DEVICE) for name in names))
    advance_rows(moved, block_size=4)
    advance_views(views, 3, 4)
    assert views.slots[:3].tolist() == [3 * 4, 9 * 4 + 3, 14 * 4 + 1], "the twin itself"
    for name in names:
        assert torch.equal(getattr(moved, name).cpu(), getattr(views, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_first_state_is_of_its_own_token_or_of_one_drawn_before(dtype: torch.dtype) -> None:
    embedding, hidden = random(9, 24, seed=1, dtype=dtype), random(5, 24, seed=2, dtype=dtype)
    before = DrawnBefore(ints([-1, 2, 0, -1, 1]), ints([4, 2147483647, 7]))  # the second could not be drawn
    embed_rows(ints([3, 0, 0, 8, 0]), before, embedding, hidden)
    assert torch.equal(hidden, embedding[[3, 7, 4, 8, 8]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias, head_norm", [(True, False), (False, True)])
def test_qkv_computes_what_its_twin_does(dtype: torch.dtype, bias: bool, head_norm: bool) -> None:
    x = random(18, HIDDEN, seed=0, dtype=dtype)
    arguments = qkv_arguments(18, dtype, bias, head_norm)
    kv = torch.zeros(2, 36, HEADS.num_kv, HEADS.dim, dtype=dtype, device=DEVICE)
    query = fused_reference.norm_qkv_rope(x, *arguments, kv, HEADS.num_q, EPS)
    own = kv[:, arguments[-1].long()]
    expected = torch.cat([query.flatten(1), own[0].flatten(1), own[1].flatten(1)], dim=1)
    assert_close(run_qkv(x, bias=bias, head_norm=head_norm), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in, splits", [(80, 1), (1300, 1), (1300, 2), (1300, 3)])
def test_residual_product_computes_what_its_twin_does(dtype: torch.dtype, num_in: int, splits: int) -> None:
    x = random(17, num_in, seed=0, dtype=dtype)
    weight, bias = random(OUTPUTS, num_in, seed=6, dtype=dtype), random(OUTPUTS, seed=7, dtype=dtype)
    expected = fused_reference.linear_residual(x, weight, bias, x[:, :OUTPUTS])
    assert_close(run_residual(x, splits=splits), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_gate_up_computes_what_its_twin_does(dtype: torch.dtype, bias: bool) -> None:
    x = random(17, HIDDEN, seed=0, dtype=dtype)
    expected = fused_reference.norm_gate_up_silu(x, *gate_up_arguments(dtype, bias), EPS)
    assert_close(run_gate_up(x, bias=bias), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_the_twin(dtype: torch.dtype) -> None:
    x = random(17, HIDDEN, seed=0, dtype=dtype)
    expected = fused_reference.norm_linear(x, *gate_up_arguments(dtype, False), EPS)
    assert_close(run_logits(x), expected, dtype)


COMPANY: dict[str, Callable[[Tensor], Tensor]] = {
    "qkv": run_qkv,
    "qkv, head norm": lambda x: run_qkv(x, head_norm=True),
    "qkv, gains in the rows": lambda x: run_qkv(x, gained=True),
    "residual": run_residual,
    "gate and up": run_gate_up,
    "gate and up, gains in the rows": lambda x: run_gate_up(x, gained=True),
    "logits": run_logits,
    "token scores": lambda x: run_tokens(x)[1],
}


@pytest.mark.parametrize("kernel", COMPANY)
def test_bits_of_a_row_do_not_depend_on_the_other_rows(kernel: str) -> None:
    """The last row, alone and as the last of many; its position is the same in all of them."""
    x = random(max(COMPANIES), HIDDEN, seed=0)
    rows = [COMPANY[kernel](x[-count:].contiguous())[-1] for count in COMPANIES]
    assert all(torch.equal(row, rows[0]) for row in rows)


def test_bits_of_a_split_sum_do_not_depend_on_the_other_rows() -> None:
    x = random(17, 1300, seed=0)
    assert torch.equal(run_residual(x, splits=3)[-1], run_residual(x[-1:].contiguous(), splits=3)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("gained", [False, True])
def test_scales_found_before_give_what_those_found_inside_do(dtype: torch.dtype, head_norm: bool, gained: bool) -> None:
    """With programs of another shape, as passes of many rows have them. On a GPU to the bit."""
    x, wide = random(37, HIDDEN, seed=0, dtype=dtype), Cut(32, WIDE_TILE)
    scales = torch.full((37,), torch.nan, device=DEVICE)
    scale_rows(x, scales, EPS)
    torch.testing.assert_close(scales, torch.rsqrt(x.float().square().mean(-1) + EPS), rtol=1e-5, atol=0)
    mlp, qkv = run_gate_up(x, gained=gained), run_qkv(x, head_norm=head_norm, gained=gained)
    for found_before in (None, scales):
        found = run_gate_up(x, gained=gained, cut=wide, scales=found_before)
        assert_equal_or_close_where_interpreted(found, mlp, dtype)
        found = run_qkv(x, head_norm=head_norm, gained=gained, cut=wide, scales=found_before)
        assert_equal_or_close_where_interpreted(found, qkv, dtype)


OUTS_FIRST = [Cut(16, Tile(32, 16, 2, 3, outs_first=True)), Cut(32, Tile(64, 32, 4, 3, outs_first=True))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [*OUTS_FIRST, Cut(64, Tile(64, 32, 4, 3))])
def test_neither_which_side_is_first_nor_the_larger_instruction_shows(dtype: torch.dtype, cut: Cut) -> None:
    """On a GPU to the bit: from 64 of the first side and four warps on, Hopper takes another instruction."""
    x = random(70, HIDDEN, seed=0, dtype=dtype)
    if not INTERPRETED and dtype == torch.float32:
        pytest.skip("float32 is never cut that way")
    assert_equal_or_close_where_interpreted(run_residual(x, cut=cut), run_residual(x), dtype)
    assert_equal_or_close_where_interpreted(run_gate_up(x, cut=cut), run_gate_up(x), dtype)
    assert_equal_or_close_where_interpreted(run_qkv(x, cut=cut), run_qkv(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [2, 3])
def test_a_program_that_makes_all_parts_adds_them_as_several_do(dtype: torch.dtype, splits: int) -> None:
    x = random(17, 1300, seed=0, dtype=dtype)
    alone = Cut(16, Tile(16, 32, 2, 3, splits, alone=True))
    assert torch.equal(run_residual(x, cut=alone), run_residual(x, splits=splits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_the_squares_of_the_stream_are_added_up_in_one_order(dtype: torch.dtype, splits: int) -> None:
    """16 at a time, halves added to halves, however the product is cut: to the bit."""
    x = random(37, 1300, seed=0, dtype=dtype)
    for cut in (Cut(16, Tile(16, 32, 2, 3, splits)), Cut(32, Tile(32, 32, 2, 3, splits, outs_first=True))):
        squares = torch.full((37, num_squares(OUTPUTS)), torch.nan, device=DEVICE)
        hidden = run_residual(x, cut=cut, squares=squares)
        assert torch.equal(squares, fused_reference.sums_of_squares(hidden))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gained", [False, True])
def test_a_norm_from_sums_of_squares_is_that_from_the_rows(dtype: torch.dtype, gained: bool) -> None:
    x = random(37, HIDDEN, seed=0, dtype=dtype)
    squares = fused_reference.sums_of_squares(x)
    assert_close(run_gate_up(x, gained=gained, squares=squares), run_gate_up(x, gained=gained), dtype)
    found = run_qkv(x, gained=gained, squares=squares)
    assert_close(found, run_qkv(x, gained=gained), dtype)
    assert torch.equal(found[-1], run_qkv(x[-1:].contiguous(), gained=gained, squares=squares[-1:].contiguous())[0])


@pytest.mark.parametrize("splits", [1, 2])
def test_the_stream_is_also_written_with_the_gains_of_the_norm_behind_it(splits: int) -> None:
    x, gains = random(18, 1300, seed=0), 1.0 + 0.2 * random(OUTPUTS, seed=1)
    tile = Tile(16, 32, 2, 3, splits)
    hidden, weight = x[:, :OUTPUTS].clone(), random(OUTPUTS, 1300, seed=6)
    num_parts, num_arrivals = split_sizes(18, OUTPUTS, tile)
    parts, arrivals = torch.zeros(num_parts, device=DEVICE), ints([0] * num_arrivals)
    gained = torch.full_like(hidden, torch.nan)
    linear_residual(x, weight, None, hidden, parts, arrivals, tile, gains=gains, gained=gained)
    assert_close(hidden, fused_reference.linear_residual(x, weight, None, x[:, :OUTPUTS]), torch.float32)
    assert torch.equal(gained, hidden * gains)


def test_only_wanted_rows_are_normed_before_the_head() -> None:
    x, norm = random(5, HIDDEN, seed=0), 1.0 + 0.2 * random(HIDDEN, seed=1)
    out = torch.full((3, HIDDEN), torch.nan, device=DEVICE)
    norm_wanted(x, ints([4, 0, 2]), norm, out, EPS, count=ints([2]))
    expected = x[[4, 0]] * torch.rsqrt(x[[4, 0]].square().mean(-1, keepdim=True) + EPS) * norm
    torch.testing.assert_close(out[:2], expected)
    assert out[2].isnan().all()


def assert_equal_or_close_where_interpreted(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The interpreter's products are numpy's, which hang on the shape."""
    if INTERPRETED:
        assert_close(found, expected, dtype)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("noisy", [False, True])
def test_tokens_are_the_argmax_of_the_logits(noisy: bool) -> None:
    x = random(18, HIDDEN, seed=0)
    logits = run_logits(x)
    if not noisy:
        assert torch.equal(run_tokens(x)[0].long(), logits.argmax(-1))
        return
    rows = torch.arange(18, device=DEVICE)
    noise = RowNoise((rows % 3 > 0) * 1.7, (rows - 4) * 987654321987654321, (rows * 5).int())
    scores = fused_reference.noisy_scores(logits, noise.temperatures, noise.seeds, noise.positions)
    found = run_tokens(x, noise)[0].long()
    assert torch.equal(found, scores.argmax(-1))
    assert (found != logits.argmax(-1)).any()


def test_the_lowest_id_wins_where_logits_tie() -> None:
    _, weight, _ = gate_up_arguments(torch.float32, False)
    x = random(3, HIDDEN, seed=0)
    best = int(run_tokens(x)[0][0])
    weight[40], weight[5] = weight[best].clone(), weight[best].clone()
    assert int(run_tokens(x, weight=weight)[0][0]) == min(best, 5)


def test_only_as_many_rows_as_are_counted_get_logits_and_tokens() -> None:
    x, norm, weight = random(19, HIDDEN, seed=0), *gate_up_arguments(torch.float32, False)[:2]
    x, whole = normed(x, norm), run_logits(x)
    for count in (0, 3, 17, 19):
        logits = torch.full((19, OUTPUTS), -1.0, device=DEVICE)
        head_logits(x, weight, logits, TILE, count=ints([count]))
        assert torch.equal(logits[:count], whole[:count])
        assert (logits[count:] == -1.0).all()
        scores = torch.zeros(19, head_tiles(OUTPUTS, TILE), device=DEVICE)
        ids = torch.zeros_like(scores, dtype=torch.int32)
        tokens, best = torch.zeros(19, dtype=torch.int32, device=DEVICE), torch.zeros(19, device=DEVICE)
        head_tokens(x, weight, scores, ids, tokens, best, None, TILE, count=ints([count]))
        assert torch.equal(tokens[:count].long(), whole[:count].argmax(-1))
        assert not scores[count:].any()


def test_a_row_that_cannot_be_sampled_shows_in_its_score() -> None:
    x = random(3, HIDDEN, seed=0)
    x[1, 4] = torch.nan
    assert run_tokens(x)[1].isfinite().tolist() == [True, False, True]


@triton.jit
def _uniform_kernel(seeds, positions, keys, out, ROWS: tl.constexpr, SIZE: tl.constexpr):
    rows, ids = tl.arange(0, ROWS), tl.arange(0, SIZE)
    key = triton_noise.noise_key(tl.load(seeds + rows), tl.load(positions + rows), 1)
    tl.store(keys + rows, key.to(tl.int64, bitcast=True))
    tl.store(out + rows[:, None] * SIZE + ids[None, :], triton_noise.keyed_uniform(key, ids))


def test_noise_is_that_of_the_host_bit_for_bit() -> None:
    seeds, positions = [0, 1, -1, 2**62 + 12345], [0, 7, 100_000, 3]
    keys = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    found = torch.zeros(4, 1024, device=DEVICE)
    _uniform_kernel[(1,)](torch.tensor(seeds, device=DEVICE), ints(positions), keys, found, ROWS=4, SIZE=1024)
    expected = [noise_key(seed, at, Purpose.SAMPLE) for seed, at in zip(seeds, positions, strict=True)]
    assert [key % 2**64 for key in keys.tolist()] == expected
    for row, key in zip(found.cpu(), expected, strict=True):
        assert torch.equal(row, torch.from_numpy(keyed_uniform(key, 1024)))


VARIANTS = {
    "llama-biases": {"num_hidden_layers": 1, "vocab_size": 40},
    "qwen2-window": {"num_hidden_layers": 2, "vocab_size": 40},
    "qwen3": {"num_hidden_layers": 1, "vocab_size": 40},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_decoder_computes_what_the_plain_one_does(variant: str, dtype: torch.dtype) -> None:
    """float32: within 1e-4. Half precision may be off by 2.5 times what the plain decoder in that dtype is off by."""
    config = config_from_dict(hf_config_dict(variant, **VARIANTS[variant]))
    weights = random_weights(config)
    pool = Pool(2, 40)
    batch = pool.batch(Rows(1, 0, [3, 4]), Rows(0, 25, [7], DraftTree([1, 2, 3], [-1, 0, 0])), device=DEVICE)
    shape = (config.num_layers, 2, pool.num_slots, config.num_kv_heads, config.head_dim)
    kv, every = 0.5 * random(*shape, seed=0), tuple(range(config.num_layers + 2))
    plain = Decoder(config, weights, dtype=dtype, device=DEVICE)
    wide = Decoder(config, weights, device=DEVICE).forward(batch, kv.clone(), hidden_layers=every)
    half = plain.forward(batch, kv.to(dtype), hidden_layers=every)
    found = FusedDecoder(plain).forward(batch, kv.to(dtype), hidden_layers=every)
    for name in ("logits", "hidden"):
        exact = getattr(wide, name).float()
        worst = (getattr(found, name).float() - exact).abs().max().item()
        rounding = (getattr(half, name).float() - exact).abs().max().item()
        assert worst < (1e-4 if dtype == torch.float32 else 2.5 * rounding), name


def test_the_fused_decoder_gives_the_same_with_programs_of_many_rows() -> None:
    config = config_from_dict(hf_config_dict("qwen3", num_hidden_layers=2, vocab_size=40))
    plain = Decoder(config, random_weights(config), device=DEVICE)
    pool = Pool(2, 40)
    batch = pool.batch(Rows(1, 0, [3, 4]), Rows(0, 25, [7], DraftTree([1, 2, 3], [-1, 0, 0])), device=DEVICE)
    kv = random(2, 2, pool.num_slots, config.num_kv_heads, config.head_dim, seed=0)
    few = FusedDecoder(plain).forward(batch, kv.clone())
    wide = Cut(32, WIDE_TILE)
    many = FusedDecoder(plain, cuts=lambda base, layer, rows: Cuts(wide, wide, wide, wide, wide)).forward(
        batch, kv.clone()
    )
    assert_equal_or_close_where_interpreted(many.logits, few.logits, torch.float32)


def test_the_fused_decoder_gives_a_tree_node_the_bits_of_plain_text_and_can_skip_layers() -> None:
    config = config_from_dict(hf_config_dict("llama", num_hidden_layers=2, vocab_size=40))
    plain = Decoder(config, random_weights(config), device=DEVICE)
    fused, pool = FusedDecoder(plain), Pool(2, 40)
    kv = random(2, 2, pool.num_slots, config.num_kv_heads, config.head_dim, seed=0)
    tree = fused.forward(pool.batch(Rows(0, 20, [7], DraftTree([1, 2, 3], [-1, 0, 0])), device=DEVICE), kv.clone())
    text = fused.forward(pool.batch(Rows(0, 20, [7, 1, 3]), device=DEVICE), kv.clone())
    assert torch.equal(tree.logits[[0, 1, 3]], text.logits)
    batch = pool.batch(Rows(0, 20, [7]), device=DEVICE)
    skipping = fused.forward(batch, kv.clone(), layers=[1]).logits
    assert_close(skipping, plain.forward(batch, kv.clone(), layers=[1]).logits, torch.float32)


def padded(fused: FusedDecoder, kv: Tensor, size: int, block_size: int) -> PaddedDecoder:
    room = PassRoom(kv, block_size, max_blocks=12, max_num_seqs=4)
    return PaddedDecoder(fused, CapturedPasses(fused), room, sizes=(size,))


def seeded_draws(count: int) -> TokenDraws:
    heat = np.array([0.0, 0.7, 1.3, 0.0, 5.0] * count, dtype=np.float32)[:count]
    return TokenDraws(heat, np.arange(count, dtype=np.int64) * 2**59 - 7, np.arange(3, 3 + count, dtype=np.int32))


@pytest.mark.parametrize("size", [7, 8, 16, 19])
@pytest.mark.parametrize("wants_logits", [False, True])
def test_a_padded_pass_gives_the_bits_and_tokens_of_the_unpadded_one_and_writes_its_slots_only(
    size: int, wants_logits: bool
) -> None:
    config = config_from_dict(hf_config_dict("qwen3", num_hidden_layers=2, vocab_size=70))
    fused = FusedDecoder(Decoder(config, random_weights(config), device=DEVICE))
    pool = Pool(3, 40)
    parts = Rows(1, 0, [3, 4]), Rows(0, 25, [7], DraftTree([1, 2, 3], [-1, 0, 0])), Rows(2, 11, [5])
    batch = pool.batch(*parts)
    batch = replace(batch, draws=seeded_draws(batch.num_rows), wants_logits=wants_logits)
    start = random(2, 2, pool.num_slots, config.num_kv_heads, config.head_dim, seed=0)
    every = tuple(range(config.num_layers + 2))
    expected_kv, kv = start.clone(), start.clone()
    expected = fused.forward(batch, expected_kv, hidden_layers=every)
    decoder = padded(fused, kv, size, pool.block_size)
    for _ in range(3):  # counters and buffers are as good after a pass as before it
        found = decoder.forward(batch, kv, hidden_layers=every)
        assert decoder.clock.num_eager == 0
        assert found.tokens == expected.tokens and None not in found.tokens
        assert found.logits.shape == expected.logits.shape and torch.equal(found.logits.to(DEVICE), expected.logits)
        assert torch.equal(found.hidden, expected.hidden)
        assert torch.equal(kv, expected_kv)
    untouched = torch.ones(pool.num_slots, dtype=torch.bool)
    untouched[batch.slot_mapping.long()] = False
    assert torch.equal(kv[:, :, untouched], start[:, :, untouched])


def test_the_tokens_that_a_pass_draws_are_those_of_its_logits() -> None:
    config = config_from_dict(hf_config_dict("llama", num_hidden_layers=2, vocab_size=70))
    fused = FusedDecoder(Decoder(config, random_weights(config), device=DEVICE))
    pool = Pool(1, 40)
    kv = random(2, 2, pool.num_slots, config.num_kv_heads, config.head_dim, seed=0)
    draws = seeded_draws(10)
    batch = replace(pool.batch(Rows(0, 5, list(range(10)))), draws=draws)
    found = padded(fused, kv, 16, pool.block_size).forward(batch, kv)
    drawn = (torch.from_numpy(x) for x in (draws.temperatures, draws.seeds, draws.positions))
    scores = fused_reference.noisy_scores(found.logits.cpu(), *drawn)
    assert found.tokens == scores.argmax(-1).tolist()
