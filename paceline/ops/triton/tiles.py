"""How a product is cut into programs: by the weight's shape, and by how many rows there are.

The bits of an output follow from the order in which its sum over K is made. A tensor core product adds 16 inputs at a
time from front to back, with Hopper's larger instruction (wgmma: 64 rows or outputs, and four warps) as with the
smaller one (mma.sync). So neither the instruction nor the length of a step nor what stands beside an output shows in
its bits. What does is into how many parts the sum is cut, and that follows from the weight's shape alone: a row gets
the same bits at 1 row and at 2,048 (`benchmarks/gpu_kernels.py --only bits`).
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
    splits: int = 1  # parts of K, each with a sum of its own; these are added in order
    alone: bool = False  # one program makes all parts in turn, where there are programs enough; else each has its own
    outs_first: bool = False  # so that 64 outputs and few rows are enough for the larger instruction (product.py)


@dataclass(frozen=True, slots=True)
class Cut:
    rows: int  # of a program
    tile: Tile


# (outputs, inputs) of a 16-bit weight -> the fastest tile at 16 rows that `benchmarks/gpu_kernels.py --only tune` found
# on one H200
MEASURED: dict[tuple[int, int], Tile] = {
    # SmolLM2-135M: qkv, output, gate and up, down, head
    (960, 576): Tile(16, 128, 2, 5),
    (576, 576): Tile(16, 64, 2, 5),
    (3072, 576): Tile(32, 128, 2, 5),
    (576, 1536): Tile(16, 512, 2, 5),  # four splits take 4 % less, and their sums would go through memory
    (49152, 576): Tile(128, 64, 4, 3),
    # Qwen2.5-1.5B
    (2048, 1536): Tile(16, 512, 2, 3),
    (1536, 1536): Tile(16, 512, 2, 3),
    (17920, 1536): Tile(32, 64, 2, 4),
    (1536, 8960): Tile(64, 128, 4, 4, splits=5, outs_first=True),
    (151936, 1536): Tile(64, 128, 4, 4, outs_first=True),
}

MANY_OUTPUTS = 8192  # from here on 32 outputs a program still give every multiprocessor of a large GPU two programs
MAX_INTO = 256  # inputs of a step: 16 + 32 rows of them, three stages deep, fit into shared memory


def tile_for(num_out: int, num_in: int, dtype: torch.dtype) -> Tile:
    """The tile of a weight [num_out, num_in] for few rows. A function of these alone."""
    if dtype.itemsize == 2 and (num_out, num_in) in MEASURED:
        return MEASURED[num_out, num_in]
    # At least two steps: the compiler makes one of a product of a single step and the sum that follows it.
    into = min(MAX_INTO, max(16, 1 << (num_in - 1).bit_length() >> 1)) * 2 // dtype.itemsize
    tile = Tile(out=32 if num_out >= MANY_OUTPUTS else 16, into=max(16, into), warps=2, stages=3)
    return replace(tile, splits=2) if num_in >= 4096 and num_out < MANY_OUTPUTS else tile


# (kind, outputs, inputs) of a packed weight -> its tile; the step must suit the groups, else `packed_tile` shortens it
PACKED: dict[tuple[str, int, int], Tile] = {
    # Qwen2.5-1.5B, groups of 128 for 4 bits and one scale an output for FP8 (benchmarks/gpu_quantization.py, tune)
    ("fp8", 2048, 1536): Tile(32, 128, 4, 3),
    ("fp8", 1536, 1536): Tile(32, 64, 4, 5, splits=2),
    ("fp8", 17920, 1536): Tile(32, 64, 2, 3),
    ("fp8", 1536, 8960): Tile(32, 64, 4, 5, splits=5),
    ("int4", 2048, 1536): Tile(16, 64, 2, 3),
    ("int4", 1536, 1536): Tile(32, 64, 4, 5, splits=2),
    ("int4", 17920, 1536): Tile(64, 32, 2, 3),
    ("int4", 1536, 8960): Tile(32, 64, 4, 3, splits=5),
}

# Inputs of a part of a step: as many as two warps have registers for, beside 64 outputs
PACKED_INTO = {"int4": 32, "int8": 64, "fp8": 64}
OUTS_FROM = ((65536, 128), (MANY_OUTPUTS, 64), (4096, 32))  # from so many outputs on: outputs of a program
PACKED_WASTE = 1.15  # a row is padded to whole steps: how many more bytes that may take


def packed_tile(kind: str, num_out: int, num_in: int, group: int) -> Tile:
    """The tile of a weight of 4 or 8 bits, which is packed for its steps. A function of these alone."""
    tile = PACKED.get((kind, num_out, num_in))
    if tile is None:
        outs = next((outs for least, outs in OUTS_FROM if num_out >= least), 16)
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


# For more than ROWS rows, the largest programs first: each value that one loads is used by more outputs.
LARGER = (
    Cut(128, Tile(128, 64, 8, 3)),
    Cut(64, Tile(128, 64, 4, 3)),
    Cut(64, Tile(64, 64, 4, 4)),
    Cut(32, Tile(64, 64, 4, 4, outs_first=True)),
    Cut(16, Tile(32, 128, 2, 3)),
    Cut(16, Tile(16, 128, 2, 3)),
)
ENOUGH_PROGRAMS = 132  # one for each multiprocessor of a large GPU

# What `--only tune` found to be the fastest at up to so many rows; the last one for more, too
MEASURED_LARGER: dict[tuple[int, int], dict[int, Cut]] = {
    (960, 576): {
        64: Cut(16, Tile(16, 64, 2, 5)),
        128: Cut(16, Tile(32, 64, 2, 4)),
        512: Cut(32, Tile(64, 64, 4, 4, outs_first=True)),
        2048: Cut(128, Tile(128, 64, 8, 3, outs_first=True)),
    },
    (576, 576): {
        128: Cut(16, Tile(64, 128, 4, 4, outs_first=True)),
        256: Cut(32, Tile(64, 128, 4, 4, outs_first=True)),
        512: Cut(32, Tile(64, 64, 4, 4, outs_first=True)),
        2048: Cut(64, Tile(64, 64, 4, 4)),
    },
    (3072, 576): {
        64: Cut(16, Tile(32, 128, 2, 5)),
        256: Cut(32, Tile(64, 64, 2, 3)),
        512: Cut(64, Tile(64, 64, 4, 4)),
        2048: Cut(128, Tile(128, 64, 8, 3)),
    },
    (576, 1536): {
        32: Cut(16, Tile(16, 512, 2, 5)),
        128: Cut(16, Tile(64, 128, 4, 4, outs_first=True)),
        512: Cut(32, Tile(64, 128, 4, 4, outs_first=True)),
        2048: Cut(64, Tile(64, 64, 4, 4, outs_first=True)),
    },
    (49152, 576): {
        32: Cut(32, Tile(128, 64, 4, 3, outs_first=True)),
        128: Cut(64, Tile(128, 64, 4, 3)),
        2048: Cut(128, Tile(256, 64, 8, 3)),
    },
    (2048, 1536): {
        32: Cut(16, Tile(16, 512, 2, 3)),
        64: Cut(16, Tile(64, 128, 4, 4, outs_first=True)),
        128: Cut(32, Tile(64, 128, 4, 4, outs_first=True)),
        512: Cut(64, Tile(64, 128, 4, 3, outs_first=True)),
        2048: Cut(128, Tile(128, 64, 8, 3)),
    },
    (1536, 1536): {
        32: Cut(16, Tile(16, 512, 2, 3)),
        64: Cut(16, Tile(64, 128, 4, 4, outs_first=True)),
        256: Cut(32, Tile(64, 128, 4, 4, outs_first=True)),
        512: Cut(32, Tile(64, 64, 4, 4, outs_first=True)),
        2048: Cut(64, Tile(128, 64, 4, 3, outs_first=True)),
    },
    (17920, 1536): {
        32: Cut(32, Tile(64, 64, 4, 4, outs_first=True)),
        64: Cut(64, Tile(64, 64, 4, 4)),
        256: Cut(64, Tile(128, 64, 4, 3)),
        2048: Cut(128, Tile(128, 64, 8, 3)),
    },
    (1536, 8960): {
        32: Cut(16, Tile(64, 128, 4, 4, outs_first=True)),
        64: Cut(32, Tile(64, 128, 4, 4, outs_first=True)),
        128: Cut(64, Tile(64, 128, 4, 3, outs_first=True)),
        256: Cut(64, Tile(128, 64, 8, 3, outs_first=True)),
        512: Cut(128, Tile(128, 64, 8, 3)),
        2048: Cut(128, Tile(128, 64, 8, 3, alone=True)),
    },
    (151936, 1536): {
        32: Cut(32, Tile(64, 128, 4, 4, outs_first=True)),
        64: Cut(64, Tile(128, 64, 4, 3)),
        2048: Cut(128, Tile(256, 64, 8, 3)),
    },
}


ROW_STEPS = (ROWS, 32, 64, 128, 256, 512, 2048)  # rows of a pass between which cuts change


def cut_of(weight: Weight, num_rows: int) -> Cut:
    """How a product with this weight is cut. The bits of a row are the same for any number of rows."""
    if isinstance(weight, PackedWeight):
        return _packed_cut(weight, num_rows)
    return cut_for(weight.shape[0], weight.shape[1], weight.dtype, num_rows)


PACKED_FROM = 48  # rows of a pass, from which programs have more of them: every program widens its weights again
PACKED_ROWS, PACKED_OUTS = 64, (128, 64)  # outputs of a program: the first that gives enough programs


def _packed_cut(weight: PackedWeight, num_rows: int) -> Cut:
    """A packed weight has been packed for one step."""
    tile = replace(packed_tile(weight.kind, *weight.shape, weight.group), into=weight.into)
    if num_rows < PACKED_FROM:
        return Cut(ROWS, tile)
    row_tiles = -(-_row_step(num_rows) // PACKED_ROWS)
    enough = (o for o in PACKED_OUTS if row_tiles * -(-weight.shape[0] // o) >= ENOUGH_PROGRAMS)
    outs = next(enough, PACKED_OUTS[-1])
    # Outputs first: weights come out of registers then, where they are widened
    return Cut(PACKED_ROWS, replace(tile, out=outs, warps=4, stages=3, outs_first=True))


def cut_for(num_out: int, num_in: int, dtype: torch.dtype, num_rows: int) -> Cut:
    """How a product of `num_rows` rows is cut. The bits of a row are the same for all of them."""
    few = tile_for(num_out, num_in, dtype)
    if num_rows <= ROWS or dtype.itemsize > 2:  # float32 does without tensor cores
        return Cut(ROWS, few)
    if (num_out, num_in) in MEASURED_LARGER:
        measured = MEASURED_LARGER[num_out, num_in]
        most = next((rows for rows in measured if num_rows <= rows), max(measured))
        return _with_splits(measured[most], few)
    num_rows = _row_step(num_rows)
    for cut in LARGER:
        programs = -(-num_rows // cut.rows) * -(-num_out // cut.tile.out)
        if cut.rows <= num_rows and programs * few.splits >= ENOUGH_PROGRAMS:
            alone = few.splits > 1 and programs >= ENOUGH_PROGRAMS
            return _with_splits(replace(cut, tile=replace(cut.tile, alone=alone)), few)
    return _with_splits(LARGER[-1], few)


def _row_step(num_rows: int) -> int:
    return next((rows for rows in ROW_STEPS if num_rows <= rows), num_rows)


def _with_splits(cut: Cut, few: Tile) -> Cut:
    return replace(cut, tile=replace(cut.tile, splits=few.splits))
