"""How a product is cut into programs: one fixed choice per weight shape, whatever the number of rows.

The bits of an output follow from the order in which its sum over K is made. That order is set by the tile below, and
the tile is looked up by the weight's shape alone, so a row gets the same bits at 1 row and at 512.
"""

from dataclasses import dataclass, replace

import torch

from paceline.ops.packed import PARTS, PackedWeight, Weight

ROWS = 16  # rows of a tile: the least that a tensor core product takes, and all that decoding needs


@dataclass(frozen=True, slots=True)
class Tile:
    out: int  # outputs of a program
    into: int  # inputs of one step of its loop over K
    warps: int
    stages: int  # loads in flight
    splits: int = 1  # programs that share K; their sums are added in order


# (outputs, inputs) of a 16-bit weight -> the fastest tile at 16 rows that `benchmarks/gpu_kernels.py --only tune` found
# on one H200
MEASURED: dict[tuple[int, int], Tile] = {
    # SmolLM2-135M: qkv, output, gate and up, down, head
    (960, 576): Tile(16, 128, 2, 3),
    (576, 576): Tile(16, 64, 2, 5),
    (3072, 576): Tile(32, 128, 2, 3),
    (576, 1536): Tile(16, 512, 2, 5),  # four splits take 4 % less, and their sums would go through memory
    (49152, 576): Tile(128, 64, 4, 3),
    # Qwen2.5-1.5B
    (2048, 1536): Tile(32, 128, 2, 3),  # 1 % more than with steps of 512, which leave wide programs no shared memory
    (1536, 1536): Tile(16, 512, 2, 3),
    (17920, 1536): Tile(64, 128, 2, 3),
    (1536, 8960): Tile(16, 512, 2, 3, splits=4),
    (151936, 1536): Tile(128, 128, 2, 3),
}

MANY_OUTPUTS = 8192  # from here on 32 outputs a program still give every multiprocessor of a large GPU two programs
MAX_INTO = 256  # inputs of a step: 16 + 32 rows of them, three stages deep, fit into shared memory


def tile_for(num_out: int, num_in: int, dtype: torch.dtype) -> Tile:
    """The tile of a weight [num_out, num_in]. A function of these alone."""
    if dtype.itemsize == 2 and (num_out, num_in) in MEASURED:
        return MEASURED[num_out, num_in]
    # At least two steps: the compiler makes one of a product of a single step and the sum that follows it.
    into = min(MAX_INTO, max(16, 1 << (num_in - 1).bit_length() >> 1)) * 2 // dtype.itemsize
    tile = Tile(out=32 if num_out >= MANY_OUTPUTS else 16, into=max(16, into), warps=2, stages=3)
    return replace(tile, splits=2) if num_in >= 4096 and num_out < MANY_OUTPUTS else tile


# (kind, outputs, inputs) of a packed weight -> its tile; the step must suit the groups, else `packed_tile` shortens it
PACKED: dict[tuple[str, int, int], Tile] = {}

# Inputs of a part of a step: as many as two warps have registers for, beside 64 outputs
PACKED_INTO = {"int4": 32, "int8": 64, "fp8": 64}
PACKED_OUTS = ((65536, 128), (MANY_OUTPUTS, 64), (4096, 32))  # from so many outputs on: outputs of a program
PACKED_WASTE = 1.15  # a row is padded to whole steps: how many more bytes that may take


def packed_tile(kind: str, num_out: int, num_in: int, group: int) -> Tile:
    """The tile of a weight of 4 or 8 bits, which is packed for its steps. A function of these alone."""
    tile = PACKED.get((kind, num_out, num_in))
    if tile is None:
        outs = next((outs for least, outs in PACKED_OUTS if num_out >= least), 16)
        splits = 4 if num_in >= 4096 and num_out < MANY_OUTPUTS else 1
        tile = Tile(outs, PACKED_INTO[kind], max(2, outs // 32), 4, splits)
    into = tile.into
    while into > 16 and (
        _padded(num_in, into * PARTS[kind]) > PACKED_WASTE * num_in or (group < num_in and group % into)
    ):
        into //= 2
    return replace(tile, into=into)


def _padded(num_in: int, step: int) -> int:
    return -(-num_in // step) * step


def tile_of(weight: Weight) -> Tile:
    if isinstance(weight, PackedWeight):
        return replace(packed_tile(weight.kind, *weight.shape, weight.group), into=weight.into)
    return tile_for(weight.shape[0], weight.shape[1], weight.dtype)


WIDE_ROWS = 64  # rows of a program in passes of many rows, which are bound by arithmetic rather than by weights
WIDE_FROM = 192  # rows of a pass: where programs of WIDE_ROWS take less time (measured at 128 and 512 rows)
PACKED_WIDE_FROM = 48  # the same where weights are packed: every program widens them again
WIDE_OUTS = (64, 32)  # outputs of a wide program, the first that gives enough programs
WIDE_INTO = 64  # inputs of a step where the step does not show: twice as many take all registers of two warps
ENOUGH_PROGRAMS = 132  # one for each multiprocessor of a large GPU


def row_tile_for(num_rows: int, *, packed: bool = False) -> int:
    """Rows of a program in a pass of so many. It does not show in the bits (see `widened`)."""
    return WIDE_ROWS if num_rows >= (PACKED_WIDE_FROM if packed else WIDE_FROM) else ROWS


def widened(tile: Tile, weight: Weight, num_rows: int, *, normed: bool) -> Tile:
    """A tile for programs of more than ROWS rows, with the same order of the sum, that fits into shared memory.

    A tensor core product adds 16 inputs at a time from front to back, so neither the length of a step nor the outputs
    beside one show in its bits. In a normed product the step does: the squares are summed column by column of a step. A
    packed weight has been packed for one step.
    Two warps keep the compiler from taking Hopper's other product instruction, which adds in another order."""
    row_tiles, num_out = -(-num_rows // WIDE_ROWS), weight.shape[0]
    is_packed = isinstance(weight, PackedWeight)
    row_tiles *= tile.splits if is_packed else 1
    wide = [out for out in WIDE_OUTS if out > tile.out and row_tiles * -(-num_out // out) >= ENOUGH_PROGRAMS]
    into = tile.into if normed or is_packed else min(tile.into, WIDE_INTO)
    return replace(tile, out=wide[0] if wide else tile.out, into=into, warps=2, stages=min(tile.stages, 3))


def after_norm(tile: Tile, weight: Weight) -> Tile:
    """The tile of a product whose rows were normed before (norm_rows.py): the step shows no more."""
    return tile if isinstance(weight, PackedWeight) else replace(tile, into=min(tile.into, WIDE_INTO))
