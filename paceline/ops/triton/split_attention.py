"""Paged tree attention in which rows of a prompt share the keys that are loaded, and programs share a row's keys.

Key number k of a row is its request's position k while k is below the row's context, and after that the row's ancestor
at that depth, found by climbing `parents`. Keys are cut into splits at multiples of `Steps.keys`, counted from key 0;
each split has a softmax of its own, and these are merged from front to back. Which program computed a split, and which
rows it had beside this one, does not show: a tree node, a row of a prompt and the same token decoded alone get the
same bits, at any batch size.

In a pass of many rows the committed rows of one request that stand together make blocks, each for one program, which
loads every key once for all of them (`Programs.block_rows`). Blocks are found on the device, from the rows themselves,
so a captured graph serves any mixture of prompts, decoding rows and trees.

With several programs a row or block the last one to finish merges what all of them left in memory; with one there is
nothing to leave. Programs without a split of their own end at once.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from paceline.core.kv_tensor import FLOAT8
from paceline.ops.triton.product import NO_PDL
from paceline.ops.triton.split_attention_kernel import attention_kernel


@dataclass(frozen=True, slots=True)
class Steps:
    """Part of the arithmetic, so the same for every pass of a model."""

    keys: int = 64  # of one softmax


STEPS = Steps()
LOG2_E = 1.4426950408889634  # the kernel takes powers of two
MIN_LINES = 16  # the smallest side that a tensor core product takes
MAX_PARTS = 16
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
BLOCKS_FROM = 32  # rows of a pass. Fewer fill a GPU only one by one, and finding blocks takes time
FEWEST_BLOCK_PARTS = 4  # fewer save less than merging what they leave takes
MAX_SCRATCH_BYTES = 1 << 28  # what programs of one block leave; where it would be more each block has one program
BUFFER_BYTES = 1 << 16  # of shared memory, for keys and values that are under way


@dataclass(frozen=True, slots=True)
class Programs:
    """How a pass is cut into programs. It does not show in the bits."""

    parts: int  # programs of a row and kv head
    block_rows: int  # rows of a block; 1: no blocks
    block_lines: int  # heads of one kv head, for all rows of a block, padded
    block_parts: int  # programs of a block and kv head
    warps: int

    @property
    def leaves_parts(self) -> bool:
        return self.parts > 1 or self.block_parts > 1


def row_lines(heads: int, kv_heads: int) -> int:
    return max(MIN_LINES, 1 << (heads // kv_heads - 1).bit_length())


def row_warps(heads: int, kv_heads: int) -> int:
    return 4 if row_lines(heads, kv_heads) < 64 else 2


def block_shape(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows, lines and warps of a block: as many lines as there are registers for (see the kernel's first lines)."""
    least, group = row_lines(heads, kv_heads), heads // kv_heads
    wanted = 16 if dtype == torch.float32 else 64 if dim <= 64 else 32  # float32 does without tensor cores
    lines = max(least, wanted)
    return lines // group, lines, 2 if lines >= 64 else 4


@cache
def programs_for(num_rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, max_splits: int) -> Programs:
    parts = _num_parts(num_rows * kv_heads, max_splits)
    block_rows, lines, warps = block_shape(heads, kv_heads, dim, dtype)
    if num_rows < BLOCKS_FROM or block_rows == 1:
        return Programs(parts, block_rows=1, block_lines=16, block_parts=1, warps=row_warps(heads, kv_heads))
    block_parts = _num_parts(-(-num_rows // block_rows) * kv_heads, max_splits)
    if block_parts < FEWEST_BLOCK_PARTS or _scratch_bytes(num_rows, heads, dim, max_splits) > MAX_SCRATCH_BYTES:
        block_parts = 1
    return Programs(parts, block_rows, lines, block_parts, warps)


def _num_parts(num_programs: int, max_splits: int) -> int:
    """How many programs share the keys of each: enough to fill the GPU. A power of two."""
    wanted = min(MAX_PARTS, max_splits, WANTED_PROGRAMS // max(1, num_programs))
    return 1 << (max(1, wanted).bit_length() - 1)


def _scratch_bytes(num_rows: int, heads: int, dim: int, max_splits: int) -> int:
    return num_rows * heads * max_splits * (dim + 2) * 4


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What attention must know of each row: tensors of a ForwardBatch, or the device step's own.

    The rows of a request stand together, its committed ones first."""

    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int32
    context_lens: Tensor  # [rows] int32
    parents: Tensor  # [rows] int32
    is_node: Tensor  # [rows] int32: 0 or 1
    req_ids: Tensor  # [rows] int32
    block_tables: Tensor  # [requests, max_blocks] int32
    block_size: int

    def max_splits(self, steps: Steps = STEPS) -> int:
        # The nodes of a tree have slots in the table too, so no path is longer than the table.
        return max(1, -(-self.block_tables.shape[1] * self.block_size // steps.keys))


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    best: Tensor  # [rows * heads * max_splits] float32
    total: Tensor  # the same
    mixed: Tensor  # [rows * heads * max_splits * dim] float32
    arrivals: Tensor  # [rows * kv heads] int32 zeros

    @staticmethod
    def allocate(
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        max_splits: int,
        device: torch.device,
        *,
        earlier: "AttentionScratch | None" = None,
    ) -> "AttentionScratch":
        """Room for a pass of so many rows; almost none where every row and block has one program. `earlier` itself
        where it is large enough: passes that follow each other can share it."""
        programs = programs_for(num_rows, num_heads, num_kv_heads, dim, dtype, max_splits)
        rows = num_rows if programs.leaves_parts else 0
        size, counters = max(1, rows * num_heads * max_splits), max(1, rows * num_kv_heads)
        if earlier is not None and earlier.best.numel() >= size and earlier.arrivals.numel() >= counters:
            return earlier
        return AttentionScratch(
            best=torch.empty(size, dtype=torch.float32, device=device),
            total=torch.empty(size, dtype=torch.float32, device=device),
            mixed=torch.empty(size * dim, dtype=torch.float32, device=device),
            arrivals=torch.zeros(counters, dtype=torch.int32, device=device),
        )


def split_tree_attention(
    query: Tensor,  # [rows, heads, dim]
    kv_layer: Tensor,  # [2, slots, kv_heads, dim], of the query's type or FLOAT8
    out: Tensor,  # [rows, heads, dim]: written
    rows: AttentionRows,
    scratch: AttentionScratch,
    window: int | None,
    scale: float,
    *,
    pdl: int = NO_PDL,
    programs: Programs | None = None,
    steps: Steps = STEPS,
) -> None:
    num_rows, heads, dim = query.shape
    _, num_slots, kv_heads, _ = kv_layer.shape
    max_splits = rows.max_splits(steps)
    cut = programs_for(num_rows, heads, kv_heads, dim, query.dtype, max_splits) if programs is None else programs
    dim_pad = max(16, triton.next_power_of_2(dim))
    is_float8 = kv_layer.dtype == FLOAT8
    stored = kv_layer.view(torch.int16) if is_float8 else kv_layer
    split_bytes = 2 * steps.keys * dim_pad * kv_layer.element_size()
    buffers = min(2, max(1, BUFFER_BYTES // split_bytes))
    at_once = min(8 if dim_pad <= 64 else 4, triton.next_power_of_2(max_splits))  # as many as there are registers for
    attention_kernel[(num_rows, kv_heads, cut.parts)](
        query, stored, out, rows.positions, rows.slots, rows.context_lens, rows.parents, rows.is_node, rows.req_ids,
        rows.block_tables, scratch.best, scratch.total, scratch.mixed, scratch.arrivals, num_rows,
        rows.block_tables.stride(0), num_slots, max_splits, window or 0, scale * LOG2_E, cut.parts, cut.block_parts,
        Q_HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=rows.block_size,
        LINES=row_lines(heads, kv_heads), BLOCK_LINES=cut.block_lines,
        BLOCK_ROWS=cut.block_rows, BLOCK_ROWS_PAD=triton.next_power_of_2(cut.block_rows),
        DIM_PAD=dim_pad, KEYS=steps.keys, WINDOWED=window is not None, EXACT=query.dtype == torch.float32,
        FLOAT8=is_float8, SHARED=cut.parts > 1, BLOCK_SHARED=cut.block_parts > 1, AT_ONCE=at_once, PDL=pdl,
        # A buffer takes two stages: the block table is read one before the keys.
        num_warps=cut.warps, num_stages=2 * buffers + 1, enable_fp_fusion=False, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
