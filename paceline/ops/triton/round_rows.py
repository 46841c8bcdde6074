"""Between a draft and the pass over it: trees become the rows of the pass. ops/rounds.py has the plain twin."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.rounds import PassInputs, RoundState


@triton.jit(do_not_specialize=["most", "rows_each", "num_levels", "tables_stride"])
def _rows_kernel(
    token_ids, positions, slots, context_lens, parents, is_node, req_ids, follows, logits_rows, draw_positions,
    temperatures, seeds, counts, tables, tables_stride,
    flags, roots, state_positions, state_tokens, state_seeds, state_temperatures, trees, most, rows_each, num_levels,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    num_requests = tl.load(counts + 1)
    if request < num_requests:
        place = tl.arange(0, ROWS)  # 0: the last token; then the nodes
        tree = trees + request * (1 + 3 * most)
        used = place < tl.where(tl.load(flags + request) != 0, 1 + tl.load(tree), 0)
        node = used & (place > 0)
        row = request * rows_each + place
        ok = place < rows_each
        parent = tl.load(tree + most + place, mask=node, other=-1)
        depth = node.to(tl.int32)
        above = parent
        for _ in range(num_levels):
            depth += (above >= 0).to(tl.int32)
            above = tl.load(tree + 1 + most + above, mask=above >= 0, other=-1)
        last = tl.load(state_positions + request)
        token = tl.where(place == 0, tl.load(state_tokens + request), tl.load(tree + place, mask=node, other=0))
        index = last + place
        block = tl.load(tables + request.to(tl.int64) * tables_stride + index // BLOCK_SIZE, mask=used, other=0)
        tl.store(token_ids + row, tl.where(used, token, 0), mask=ok)
        tl.store(positions + row, tl.where(used, last + depth, 0), mask=ok)
        tl.store(draw_positions + row, tl.where(used, last + 1 + depth, 0), mask=ok)
        tl.store(slots + row, tl.where(used, block * BLOCK_SIZE + index % BLOCK_SIZE, -1), mask=ok)
        tl.store(context_lens + row, tl.where(used, last + 1, 0), mask=ok)
        tl.store(parents + row, tl.where(parent >= 0, request * rows_each + 1 + parent, -1), mask=ok)
        tl.store(is_node + row, node.to(tl.int32), mask=ok)
        tl.store(req_ids + row, place * 0 + request, mask=ok)
        tl.store(follows + row, place * 0 - 1, mask=ok)
        tl.store(logits_rows + row, row, mask=ok)
        tl.store(temperatures + row, tl.load(state_temperatures + request) + place * 0.0, mask=ok)
        tl.store(seeds + row, tl.load(state_seeds + request) + place.to(tl.int64) * 0, mask=ok)
        tl.store(roots + request, request * rows_each)


@triton.jit(do_not_specialize=["rows_each"])
def _counts_kernel(counts, rows_each):
    num_requests = tl.load(counts + 1)
    tl.store(counts, num_requests * rows_each)
    tl.store(counts + 2, num_requests * rows_each)


def write_rows(
    inputs: PassInputs, state: RoundState, trees: Tensor, rows_each: int, num_levels: int, block_size: int
) -> None:
    """Of as many requests as `inputs.counts` says, `trees.shape[0]` at most."""
    most = (trees.shape[1] - 1) // 3
    _rows_kernel[(trees.shape[0],)](
        inputs.token_ids, inputs.positions, inputs.slots, inputs.context_lens, inputs.parents, inputs.is_node,
        inputs.req_ids, inputs.follows, inputs.logits_rows, inputs.draw_positions, inputs.temperatures, inputs.seeds,
        inputs.counts, inputs.block_tables, inputs.block_tables.stride(0),
        state.flags, state.roots, state.positions, state.tokens, state.seeds, state.temperatures, trees, most,
        rows_each, num_levels, BLOCK_SIZE=block_size, ROWS=triton.next_power_of_2(rows_each), num_warps=1,
    )  # fmt: skip
    _counts_kernel[(1,)](inputs.counts, rows_each, num_warps=1)
