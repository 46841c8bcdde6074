"""What attention over the paged cache must hold, at small sizes. Run by test_triton_attention.py in a process of its
own: in Triton's interpreter on a CPU, or on a GPU, where equal means to the bit and shapes of real models are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import triton
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.core.kv_tensor import as_float8
from paceline.core.tree import DraftTree
from paceline.models.fused_decoder import attention_rows
from paceline.ops import reference
from paceline.ops.triton.split_attention import (
    AttentionRows,
    AttentionScratch,
    Programs,
    Steps,
    block_shape,
    programs_for,
    split_tree_attention,
)
from tests.forward_batches import Pool, Rows

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
TREE = DraftTree([3, 4, 5, 6, 7], [-1, 0, 0, 2, -1])


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    steps: Steps
    float8: bool = False  # keys and values

    @property
    def tolerance(self) -> float:
        return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[self.dtype]


SMALL = Shape(6, 2, 16, torch.float32, Steps(keys=16))
ODD = Shape(5, 1, 24, torch.float32, Steps(keys=16))  # a head dimension and a group that are no powers of two
SMALL_FLOAT8 = Shape(6, 2, 32, torch.float32, Steps(keys=16), float8=True)
ODD_FLOAT8 = Shape(5, 1, 40, torch.float32, Steps(keys=16), float8=True)
REAL = [
    Shape(9, 3, 64, torch.bfloat16, Steps()),
    Shape(12, 2, 128, torch.bfloat16, Steps()),
    Shape(8, 8, 64, torch.float16, Steps()),
    Shape(9, 3, 64, torch.float32, Steps()),
]
REAL_FLOAT8 = [replace(shape, float8=True) for shape in REAL[:3]]
SMALL_SHAPES = (SMALL, ODD, SMALL_FLOAT8, ODD_FLOAT8)
SHAPES = [SMALL, ODD_FLOAT8] if INTERPRETED else [*SMALL_SHAPES, *REAL, *REAL_FLOAT8]

ROW_BY_ROW = Programs(parts=1, block_rows=1, block_lines=16, block_parts=1, warps=4)


def small_cuts(shape: Shape) -> dict[str, Programs]:
    blocks = Programs(1, block_rows=16 * shape.kv_heads // shape.heads, block_lines=16, block_parts=1, warps=2)
    return {
        "row by row": ROW_BY_ROW,
        "programs share a row": replace(ROW_BY_ROW, parts=2),
        "blocks": blocks,
        "programs share a block": replace(blocks, parts=2, block_parts=3),
    }


def large_cuts(shape: Shape) -> dict[str, Programs]:
    """As the engine's."""
    rows, lines, warps = block_shape(shape.heads, shape.kv_heads, shape.dim, shape.dtype)
    blocks = Programs(1, rows, lines, 1, warps)
    return {
        "row by row": ROW_BY_ROW,
        "programs share a row": replace(ROW_BY_ROW, parts=16),
        "two warps a row": replace(ROW_BY_ROW, warps=2),
        "blocks": blocks,
        "programs share a block": replace(blocks, parts=2, block_parts=8),
    }


def cuts(shape: Shape) -> dict[str, Programs]:
    found = small_cuts(shape) if shape in SMALL_SHAPES else large_cuts(shape)
    if shape.dtype == torch.float16 or (shape.dtype == torch.float32 and shape not in SMALL_SHAPES):
        return {name: found[name] for name in ("row by row", "blocks")}  # each takes seconds to compile
    return found


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def keys_and_values(num_slots: int, shape: Shape) -> Tensor:
    made = random(2, num_slots, shape.kv_heads, shape.dim, seed=1, dtype=shape.dtype)
    return as_float8(made) if shape.float8 else made


def attend(
    query: Tensor, kv: Tensor, rows: AttentionRows, shape: Shape, programs: Programs | None, window: int | None = None
) -> Tensor:
    size = len(query) * shape.heads * rows.max_splits(shape.steps)
    scratch = AttentionScratch(
        best=torch.full((size,), torch.nan, device=DEVICE),
        total=torch.full((size,), torch.nan, device=DEVICE),
        mixed=torch.full((size * shape.dim,), torch.nan, device=DEVICE),
        arrivals=torch.zeros(len(query) * shape.kv_heads, dtype=torch.int32, device=DEVICE),
    )
    out = torch.full_like(query, torch.nan)
    split_tree_attention(query, kv, out, rows, scratch, window, 0.25, programs=programs, steps=shape.steps)
    assert not scratch.arrivals.any(), "the counters are not ready for the next pass"
    return out


def assert_same(found: Tensor, expected: Tensor, shape: Shape) -> None:
    """To the bit on a GPU. The interpreter's products are numpy's, which hang on the number of lines."""
    if INTERPRETED:
        assert (found - expected).abs().max().item() < 1e-6
    else:
        assert torch.equal(found, expected)


def mixed_batch(pool: Pool, times: int) -> ForwardBatch:
    """Two chunks, a chain and a tree behind contexts that end in the middle of a split, and a row that decodes.

    In the first chunk a window of 21 begins in another split for the first rows of a block than for its last ones."""
    return pool.batch(
        Rows(1, 34 * times, list(range(6 * times))),
        Rows(2, 0, [3], DraftTree.chain([5])),
        Rows(3, 0, list(range(3 * times))),
        Rows(0, 34 * times, [7], TREE),
        Rows(4, 47 * times, [1]),
        device=DEVICE,
    )


WINDOWED = [SMALL] if INTERPRETED else [SMALL, REAL[0], REAL_FLOAT8[0]]


@pytest.mark.parametrize("shape, window", [*((s, None) for s in SHAPES), *((s, 21) for s in WINDOWED)], ids=str)
def test_attention_computes_what_its_twin_does_however_it_is_cut_into_programs(
    shape: Shape, window: int | None
) -> None:
    times = shape.steps.keys // 16  # as many splits for all shapes
    pool = Pool(5, 64 * times)
    batch, window = mixed_batch(pool, times), None if window is None else window * times
    query = random(batch.num_rows, shape.heads, shape.dim, seed=0, dtype=shape.dtype)
    kv = keys_and_values(pool.num_slots, shape)
    slots = reference.row_slots(batch)
    expected = reference.paged_tree_attention(query.float(), kv.float(), slots, window, 0.25)
    rows = attention_rows(batch)
    tried = cuts(shape)
    if INTERPRETED and window is not None:
        del tried["programs share a row"], tried["blocks"]  # each takes seconds there
    found = {name: attend(query, kv, rows, shape, cut, window) for name, cut in tried.items()}
    for out in found.values():
        worst = (out.float() - expected).abs().max().item()
        assert worst <= shape.tolerance * max(1.0, expected.abs().max().item())
        assert_same(out, found["row by row"], shape)
    if {"programs share a row", "blocks"} <= found.keys():  # programs of the same lines: to the bit everywhere
        assert torch.equal(found["row by row"], found["programs share a row"])
        assert torch.equal(found["blocks"], found["programs share a block"])


def text(pool: Pool, request: int, begin: int, end: int) -> Rows:
    return Rows(request, begin, list(range(begin, end)))


IN_EVERY_WAY = [SMALL, SMALL_FLOAT8] if INTERPRETED else [SMALL, SMALL_FLOAT8, *REAL[:2], *REAL_FLOAT8[:2]]


@pytest.mark.parametrize("shape", IN_EVERY_WAY, ids=str)
def test_a_row_gets_the_same_alone_in_any_chunk_and_as_a_tree_node(shape: Shape) -> None:
    """Rows at positions [begin, end) of one text, with keys of more than two splits before them."""
    begin, end, company = (28, 36, 3) if INTERPRETED else (150, 250, 37)
    pool = Pool(2, end + 8)
    kv = keys_and_values(pool.num_slots, shape)
    queries = random(end + 8, shape.heads, shape.dim, seed=2, dtype=shape.dtype)
    blocks = cuts(shape)["blocks"]

    def rows_of(parts: Sequence[Rows], places: list[int], cut: Programs) -> Tensor:
        batch = pool.batch(*parts, device=DEVICE)
        return attend(queries[places].contiguous(), kv, attention_rows(batch), shape, cut)

    places = list(range(begin, end))
    whole = rows_of([text(pool, 0, begin, end)], places, blocks)
    alone = {at: rows_of([text(pool, 0, at, at + 1)], [at], replace(ROW_BY_ROW, parts=2)) for at in places[::3]}
    for at, row in alone.items():
        assert_same(row[0], whole[at - begin], shape)
    middle = begin + 4
    shifted = rows_of(
        [text(pool, 1, 0, company), text(pool, 0, begin, middle)],
        [*range(company), *range(begin, middle)],
        blocks,
    )
    rest = rows_of([text(pool, 0, middle, end)], list(range(middle, end)), replace(blocks, parts=2, block_parts=2))
    assert_same(torch.cat([shifted[company:], rest]), whole, shape)
    chain = Rows(0, begin, [0], DraftTree.chain(list(range(begin + 1, end))))
    assert_same(rows_of([chain], places, blocks), whole, shape)


def test_padding_rows_change_nobody_and_give_zeros() -> None:
    """They carry request 0, as its own rows before them do."""
    pool = Pool(1, 32)
    batch = pool.batch(text(pool, 0, 3, 8), device=DEVICE)
    rows, padding = attention_rows(batch), 3

    def padded(values: Tensor, fill: int) -> Tensor:
        return torch.cat([values, values.new_full((padding,), fill)])

    filled = replace(
        rows,
        positions=padded(rows.positions, 0),
        slots=padded(rows.slots, -1),
        context_lens=padded(rows.context_lens, 0),
        parents=padded(rows.parents, -1),
        is_node=padded(rows.is_node, 0),
        req_ids=padded(rows.req_ids, 0),
    )
    query = random(5 + padding, SMALL.heads, SMALL.dim, seed=0, dtype=SMALL.dtype)
    kv = random(2, pool.num_slots, SMALL.kv_heads, SMALL.dim, seed=1, dtype=SMALL.dtype)
    for cut in (cuts(SMALL)["blocks"], cuts(SMALL)["programs share a block"]):
        out = attend(query, kv, filled, SMALL, cut)
        assert torch.equal(out[:5], attend(query[:5].contiguous(), kv, rows, SMALL, cut))
        assert not out[5:].any()


def test_programs_for_never_asks_for_lines_and_warps_that_change_the_product() -> None:
    """Hopper's other instruction takes over from 64 lines and four warps on (see split_attention_kernel.py)."""
    for heads, kv_heads in [(9, 3), (12, 2), (32, 32), (32, 8), (28, 4), (64, 8), (64, 1), (16, 1)]:
        for dim in (16, 64, 128, 256):
            for num_rows in (1, 16, 31, 32, 128, 1024, 4096):
                cut = programs_for(num_rows, heads, kv_heads, dim, torch.bfloat16, max_splits=512)
                lines = max(16, triton.next_power_of_2(heads // kv_heads), cut.block_lines if cut.block_rows > 1 else 0)
                assert lines < 64 or cut.warps < 4
                assert cut.block_rows == 1 or cut.block_rows * (heads // kv_heads) <= cut.block_lines


def test_scratch_is_shared_by_passes_that_fit_and_stays_small() -> None:
    device = torch.device(DEVICE)
    largest = AttentionScratch.allocate(24, 9, 3, 64, torch.bfloat16, 128, device)
    assert AttentionScratch.allocate(8, 9, 3, 64, torch.bfloat16, 128, device, earlier=largest) is largest
    assert AttentionScratch.allocate(24, 9, 3, 64, torch.bfloat16, 256, device, earlier=largest) is not largest
    for num_rows in (32, 128, 384, 1024, 4096):
        room = AttentionScratch.allocate(num_rows, 12, 2, 128, torch.bfloat16, 512, torch.device("meta"))
        assert room.mixed.nbytes <= 1 << 28
