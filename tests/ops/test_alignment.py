"""Bits that do not depend on where operands lie in memory, with one thread and with two.

A BLAS chooses its kernel by the address; these tests move every operand of a promised product on purpose.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops import linear, reference
from paceline.ops.alignment import ALIGNMENT_BYTES, aligned, aligned_copy
from tests.placement import NUM_THREADS, OFFSETS, at_offset

# Sizes of a real model, and odd ones whose second row begins 4 bytes after a multiple of 64
SHAPES = [(320, 576), (64, 48), (97, 33), (8, 4), (31, 1)]


@pytest.fixture(params=NUM_THREADS, ids=lambda count: f"{count} threads", autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits_wherever_they_lie(compute: Callable[..., Tensor], *operands: Tensor) -> None:
    """The result is the same with each operand at each offset, the others where PyTorch allocates."""
    expected = compute(*operands)
    for which in range(len(operands)):
        for offset in OFFSETS:
            moved = [at_offset(x, offset) if i == which else x for i, x in enumerate(operands)]
            assert torch.equal(compute(*moved), expected), f"operand {which} at {offset} bytes"


@pytest.mark.parametrize("size", [1, 3, 33, 1000, 100_000])
def test_fresh_memory_is_aligned(size: int) -> None:
    """What `aligned_copy` relies on."""
    held = [aligned_copy(random(size)) for _ in range(20)]
    assert all(x.data_ptr() % ALIGNMENT_BYTES == 0 for x in held)


def test_only_what_lies_elsewhere_is_copied() -> None:
    x = aligned_copy(random(6, 16))
    assert aligned(x) is x
    for other in (at_offset(x, 4), x.T, x[:, :8], x[:, 1:]):
        copy = aligned(other)
        assert copy.data_ptr() % ALIGNMENT_BYTES == 0 and copy.is_contiguous() and torch.equal(copy, other)


@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "row by row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(tiled: bool, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not tiled:
        monkeypatch.setattr(linear, "place_in_tile_is_free", lambda *shape: False)
    num_out, num_in = shape
    weight, bias = random(num_out, num_in).to(dtype), random(num_out, seed=1).to(dtype)
    x = random(19, num_in, seed=2).to(dtype)
    bits_wherever_they_lie(linear.invariant_linear, x, weight)
    bits_wherever_they_lie(linear.invariant_linear, x, weight, bias)


@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "row by row"])
def test_a_linears_rows_may_be_strided(tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tiled:
        monkeypatch.setattr(linear, "place_in_tile_is_free", lambda *shape: False)
    x, weight = random(37, 33), random(97, 33, seed=1)
    expected = linear.invariant_linear(x, weight)
    for same in (x.T.contiguous().T, F.pad(x, (1, 2))[:, 1:-2], torch.cat([x, x], 1)[:, 33:]):
        assert torch.equal(linear.invariant_linear(same, weight), expected)
    assert torch.equal(linear.invariant_linear(x, weight.T.contiguous().T), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 33, 64])
@pytest.mark.parametrize("kv_heads, heads", [(1, 1), (1, 3), (3, 9)])
def test_attention(dtype: torch.dtype, head_dim: int, kv_heads: int, heads: int) -> None:
    slots = [list(range(n)) for n in (1, 5, 17, 50)]
    query, kv_layer = random(4, heads, head_dim).to(dtype), random(2, 64, kv_heads, head_dim, seed=1).to(dtype)
    for window in (None, 7):
        bits_wherever_they_lie(
            lambda q, kv, w=window: reference.paged_tree_attention(q, kv, slots, w, 0.3), query, kv_layer
        )


@pytest.mark.parametrize("head_dim", [8, 33, 64])
def test_attention_of_a_row_is_the_same_alone_and_in_a_batch(head_dim: int) -> None:
    query, kv_layer = random(5, 3, head_dim), random(2, 64, 3, head_dim, seed=1)
    slots = [list(range(n)) for n in (1, 5, 17, 50, 33)]
    together = reference.paged_tree_attention(query, kv_layer, slots, None, 0.3)
    for row in range(5):
        alone = reference.paged_tree_attention(query[row : row + 1].clone(), kv_layer, slots[row : row + 1], None, 0.3)
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 74, 1536, 80_000])
def test_elementwise_rows(dtype: torch.dtype, size: int) -> None:
    x, weight = random(3, size).to(dtype), random(size, seed=1).to(dtype)
    bits_wherever_they_lie(reference.silu_mul, x)
    bits_wherever_they_lie(lambda x, weight: reference.rms_norm(x, weight, 1e-5), x, weight)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_measured_tile_holds_for_any_rows(has_bias: bool, num_threads: int) -> None:
    """Where a tile is said to be free, rows that the measurement never saw keep their bits at every place."""
    for num_out, num_in in SHAPES:
        if not linear.place_in_tile_is_free(num_out, num_in, torch.float32, num_threads, has_bias):
            continue
        weight, rows = random(num_out, num_in, seed=5), random(16, num_in, seed=6)
        bias = random(num_out, seed=7) if has_bias else None
        alone = torch.cat([linear.invariant_linear(row[None], weight, bias) for row in rows])
        for places in range(16):
            found = linear.invariant_linear(rows.roll(places, 0), weight, bias).roll(-places, 0)
            assert torch.equal(found, alone), (num_out, num_in, places)
