"""The inputs of the next pass of a model that drafts a chain. ops/chain.py has the plain twin."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from paceline.ops.lookup import WalkedTokens
from paceline.ops.rounds import PassInputs, RoundState


@triton.jit(do_not_specialize=["step", "tables_stride", "record", "num_pairs"])
def _chain_kernel(
    token_ids, positions, slots, context_lens, parents, is_node, req_ids, follows, logits_rows, draw_positions,
    temperatures, seeds, counts, tables, tables_stride,
    flags, state_positions, state_tokens, state_seeds, state_temperatures, next_tokens, walked_counts, record,
    num_pairs, step, BLOCK_SIZE: tl.constexpr, ROWS_EACH: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    own = request.to(tl.int64) * record
    num_fed = tl.where(tl.load(walked_counts + own) > 1, ROWS_EACH, 1)
    num_fed = tl.where(tl.load(flags + request) != 0, num_fed, 0)
    position = tl.load(state_positions + request) + step
    place = tl.arange(0, ROWS_EACH)
    row = request * ROWS_EACH + place
    is_last = place == ROWS_EACH - 1
    is_fed = place >= ROWS_EACH - num_fed
    at = position - (ROWS_EACH - 1 - place)
    before = tl.load(next_tokens + own + num_pairs - 2)  # a walk has room for two
    token = tl.where(is_last, tl.load(state_tokens + request), before)
    block = tl.load(tables + request.to(tl.int64) * tables_stride + at // BLOCK_SIZE, mask=is_fed, other=0)
    tl.store(token_ids + row, tl.where(is_fed, tl.where(step == 0, token, 0), 0))
    tl.store(follows + row, tl.where(is_fed, tl.where(step > 0, request, -1), -1))
    tl.store(positions + row, tl.where(is_fed, at, 0))
    tl.store(context_lens + row, tl.where(is_fed, at + 1, 0))
    tl.store(slots + row, tl.where(is_fed, block * BLOCK_SIZE + at % BLOCK_SIZE, -1))
    tl.store(parents + row, place * 0 - 1)
    tl.store(is_node + row, place * 0)
    tl.store(req_ids + row, place * 0 + request)
    tl.store(logits_rows + request, request * ROWS_EACH + ROWS_EACH - 1)
    tl.store(draw_positions + request, position + 1)
    tl.store(seeds + request, tl.load(state_seeds + request))
    temperature = tl.load(state_temperatures + request)
    tl.store(temperatures + request, temperature * 0.0 if GREEDY else temperature)
    if request == 0:
        num_requests = tl.num_programs(0)
        tl.store(counts, num_requests * ROWS_EACH)
        tl.store(counts + 1, num_requests)
        tl.store(counts + 2, num_requests)


def write_chain(
    inputs: PassInputs,
    state: RoundState,
    walked: WalkedTokens,
    step: int,
    rows_each: int,
    block_size: int,
    *,
    greedy: bool,
) -> None:
    num_requests, num_pairs = walked.next_tokens.shape
    _chain_kernel[(num_requests,)](
        inputs.token_ids, inputs.positions, inputs.slots, inputs.context_lens, inputs.parents, inputs.is_node,
        inputs.req_ids, inputs.follows, inputs.logits_rows, inputs.draw_positions, inputs.temperatures, inputs.seeds,
        inputs.counts, inputs.block_tables, inputs.block_tables.stride(0),
        state.flags, state.positions, state.tokens, state.seeds, state.temperatures, walked.next_tokens, walked.counts,
        walked.next_tokens.stride(0), num_pairs, step,
        BLOCK_SIZE=block_size, ROWS_EACH=rows_each, GREEDY=greedy, num_warps=1,
    )  # fmt: skip
