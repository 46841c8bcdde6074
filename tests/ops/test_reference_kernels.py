"""The plain kernels against PyTorch's own, the fast attention against the plain one, and the promise about bits."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import DraftTree
from paceline.ops import attention, linear, reference
from tests.forward_batches import Pool, Rows
from tests.placement import NUM_THREADS

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SCALE = HEAD_DIM**-0.5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_pytorchs() -> None:
    x, weight = random(5, 3, 32), random(32, seed=1)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (32,), weight, 1e-5))


def test_silu_mul_splits_gate_from_up() -> None:
    gate_up = random(4, 20)
    torch.testing.assert_close(reference.silu_mul(gate_up), F.silu(gate_up[:, :10]) * gate_up[:, 10:])


def test_rope_turns_pairs_by_the_angle() -> None:
    x = random(3, 2, HEAD_DIM)
    angles = random(3, HEAD_DIM // 2, seed=1)
    turned = reference.rope(x, angles.cos(), angles.sin())
    half = HEAD_DIM // 2
    as_complex = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned, torch.cat([as_complex.real, as_complex.imag], dim=-1))


def test_linear_and_its_tiled_form_are_pytorchs() -> None:
    x, weight, bias = random(19, 24), random(40, 24, seed=1), random(40, seed=2)
    for found in (reference.linear(x, weight, bias), linear.invariant_linear(x, weight, bias)):
        torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (3072, 576), (97, 33)])
@pytest.mark.parametrize("num_threads", NUM_THREADS)
def test_a_rows_bits_do_not_depend_on_its_neighbours_or_place(
    tiled: bool, dtype: torch.dtype, shape: tuple[int, int], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiled form where the BLAS allows it, and in the row-by-row form that stands in where it does not."""
    torch.set_num_threads(num_threads)
    if not tiled:
        monkeypatch.setattr(linear, "place_in_tile_is_free", lambda *shape: False)
    num_out, num_in = shape
    weight, row = random(num_out, num_in).to(dtype), random(num_in, seed=1).to(dtype)
    alone = linear.invariant_linear(row[None], weight)[0]
    for num_rows in (2, 7, 16, 17, 40):
        for place in {0, 1, num_rows // 2, num_rows - 1}:
            x = random(num_rows, num_in, seed=num_rows + place).to(dtype)
            x[place] = row
            assert torch.equal(linear.invariant_linear(x, weight)[place], alone)


def _at_the_last_place(x: torch.Tensor) -> torch.Tensor:
    last = torch.zeros(x.shape[0], 1)
    last[-1] = 1.0
    return last


def _at_place_9_for_one_row_in_six(x: torch.Tensor) -> torch.Tensor:
    matters = torch.zeros(x.shape[0], 1)
    matters[9] = float(x[9, 0] < -1.0)
    return matters


@pytest.mark.parametrize("rounding", [_at_the_last_place, _at_place_9_for_one_row_in_six])
def test_where_the_place_matters_rows_are_multiplied_alone(
    rounding: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement itself: a BLAS that rounds differently at one place of a tile is detected."""
    honest = F.linear
    monkeypatch.setattr(linear.F, "linear", lambda x, w, b=None: honest(x, w, b) + rounding(x))
    linear.place_in_tile_is_free.cache_clear()
    try:
        assert not linear.place_in_tile_is_free(8, 4, torch.float32, 1)
    finally:
        linear.place_in_tile_is_free.cache_clear()


def test_elementwise_rows_have_the_same_bits_in_any_batch() -> None:
    """Sizes that leave a remainder after any vector width, where a scalar tail could round differently."""
    x, weight = random(13, 2 * 37), random(2 * 37, seed=1)
    for kernel in (reference.silu_mul, lambda part: reference.rms_norm(part, weight, 1e-5)):
        together = kernel(x)
        assert all(torch.equal(kernel(x[i : i + 1])[0], together[i]) for i in range(13))


def test_attention_is_softmax_over_the_rows_own_keys() -> None:
    """One committed row at position 4 and a two-node chain, written out by hand."""
    pool = Pool(1, 12)
    batch = pool.batch(Rows(0, 4, [9], DraftTree.chain([7, 8])))
    kv = random(2, pool.num_slots, KV_HEADS, HEAD_DIM)
    query = random(3, HEADS, HEAD_DIM, seed=1)
    found = reference.paged_tree_attention(query, kv, reference.row_slots(batch), None, SCALE)
    for row, num_keys in enumerate((5, 6, 7)):
        slots = [pool.slot(0, i) for i in range(num_keys)]
        for head in range(HEADS):
            keys, values = kv[0, slots, head // 3], kv[1, slots, head // 3]
            weights = torch.softmax(keys @ query[row, head] / math.sqrt(HEAD_DIM), dim=0)
            torch.testing.assert_close(found[row, head], weights @ values)


@st.composite
def passes(draw: st.DrawFn) -> list[Rows]:
    """Requests in any state: a chunk in the middle of a prompt, one decode row, either with any tree behind it."""
    parts = []
    for request in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 6))
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        new = [1] * draw(st.integers(1, 5))
        parts.append(Rows(request, draw(st.integers(0, 9)), new, DraftTree([1] * size, parents)))
    return parts


@settings(max_examples=40, deadline=None)
@given(parts=passes(), window=st.sampled_from([None, 1, 3, 6]))
def test_fast_attention_is_the_plain_one(parts: list[Rows], window: int | None) -> None:
    pool = Pool(4, 24)
    batch = pool.batch(*parts)
    kv = random(2, pool.num_slots, KV_HEADS, HEAD_DIM)
    query = random(batch.num_rows, HEADS, HEAD_DIM, seed=1)
    plain = reference.paged_tree_attention(query, kv, reference.row_slots(batch), window, SCALE)
    fast = attention.attend(query, kv, attention.plan_attention(batch), window, SCALE)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


def test_write_kv_goes_where_the_slots_say() -> None:
    kv = torch.zeros(2, 8, KV_HEADS, HEAD_DIM)
    key, value = random(2, KV_HEADS, HEAD_DIM), random(2, KV_HEADS, HEAD_DIM, seed=1)
    reference.write_kv(key, value, kv, torch.tensor([6, 1], dtype=torch.int32))
    assert torch.equal(kv[0, [6, 1]], key) and torch.equal(kv[1, [6, 1]], value)
    assert not kv[:, [0, 2, 3, 4, 5, 7]].any()
