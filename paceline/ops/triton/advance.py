"""The inputs of a pass become those of the next one, on the device: every row goes on with the token that it drew.

For a pass of one row for each request whose next pass has the same requests, so that the host has nothing to send but
new KV blocks.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.product import NO_PDL, wait_for_previous_kernel

ROWS = 64  # of a program


@dataclass(frozen=True, slots=True)
class RowInputs:
    """All [rows] int32, and written, but for the last three."""

    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    follows: Tensor
    draw_positions: Tensor
    req_ids: Tensor
    counts: Tensor  # [0]: rows that are not padding
    block_tables: Tensor  # [requests, max_blocks]


@triton.jit
def _advance_kernel(
    positions, slots, context_lens, follows, draw_positions, req_ids, counts, tables, width, num_rows,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = (rows < num_rows) & (rows < tl.load(counts))
    position = tl.load(positions + rows, mask=ok, other=0) + 1
    table = tables + tl.load(req_ids + rows, mask=ok, other=0).to(tl.int64) * width
    block = tl.load(table + position // BLOCK_SIZE, mask=ok, other=0)
    tl.store(positions + rows, position, mask=ok)
    tl.store(slots + rows, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=ok)
    tl.store(context_lens + rows, position + 1, mask=ok)
    tl.store(follows + rows, rows, mask=ok)
    tl.store(draw_positions + rows, tl.load(draw_positions + rows, mask=ok, other=0) + 1, mask=ok)


def advance_rows(rows: RowInputs, block_size: int, *, pdl: int = NO_PDL) -> None:
    num_rows = rows.positions.shape[0]
    _advance_kernel[(triton.cdiv(num_rows, ROWS),)](
        rows.positions, rows.slots, rows.context_lens, rows.follows, rows.draw_positions, rows.req_ids, rows.counts,
        rows.block_tables, rows.block_tables.stride(0), num_rows,
        BLOCK_SIZE=block_size, ROWS=ROWS, PDL=pdl, num_warps=2, launch_pdl=pdl > NO_PDL,
    )  # fmt: skip
