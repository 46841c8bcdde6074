"""How products on a GPU are cut into programs: what must not change with the number of rows, and what must fit."""

import pytest
import torch

from paceline.ops.packed import PackedWeight
from paceline.ops.triton.tiles import ROWS, Cut, cut_for, cut_of, packed_tile, tile_for

SHAPES = [(960, 576), (576, 1536), (49152, 576), (2048, 1536), (1536, 8960), (151936, 1536), (4096, 4096), (80, 48)]
COUNTS = [1, 16, 17, 32, 33, 64, 100, 128, 129, 500, 2048]
SHARED_BYTES = 227 * 1024  # of a Hopper multiprocessor


def check(cut: Cut, num_rows: int, itemsize: int) -> None:
    assert cut.rows < max(2 * num_rows, ROWS + 1), "most of a program would be empty"
    assert (cut.rows + cut.tile.out) * cut.tile.into * itemsize * (cut.tile.stages - 1) <= SHARED_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_programs_share_a_sum_in_the_same_way_for_any_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """That is all of a cut that shows in the bits of a 16-bit product; float32 keeps its cut."""
    few = tile_for(*shape, dtype)
    for num_rows in COUNTS:
        cut = cut_for(*shape, dtype, num_rows)
        assert cut.tile.splits == few.splits
        check(cut, num_rows, dtype.itemsize)
        if dtype == torch.float32:
            assert cut == Cut(ROWS, few)


@pytest.mark.parametrize("kind, group", [("int4", 32), ("int4", 128), ("int8", 16), ("fp8", 1 << 20)])
@pytest.mark.parametrize("shape", SHAPES[:6])
def test_a_packed_weight_keeps_the_step_that_it_was_packed_for(kind: str, group: int, shape: tuple[int, int]) -> None:
    tile = packed_tile(kind, *shape, min(group, shape[1]))
    nothing = torch.empty(0)
    weight = PackedWeight(nothing, nothing, kind, min(group, shape[1]), tile.into, shape, torch.bfloat16)
    for num_rows in COUNTS:
        cut = cut_of(weight, num_rows)
        assert cut.tile.into == tile.into and cut.tile.splits == tile.splits
        check(cut, num_rows, 2)
