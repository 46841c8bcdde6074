"""Chains drafted by a model on the device: the plain twin of ops/triton/chain.py.

`write_chain` makes the inputs of one pass of the drafting model: step 0 has each request's last token, every later step
the token that the step before drew. A model with keys of its own has none for the token before the last one where all
of its last draft was accepted: that token was drawn, but never fed. Then step 0 has two rows for each request.
"""

import torch

from paceline.ops.lookup import WalkedTokens
from paceline.ops.rounds import PassInputs, RoundState


def write_chain(
    inputs: PassInputs,  # written: of R requests, one after the other, and with as many rows as they have
    state: RoundState,
    walked: WalkedTokens,  # [R, ...]
    step: int,
    rows_each: int,  # 1, or 2 in step 0
    block_size: int,
    *,
    greedy: bool,  # without noise, whatever the requests have
) -> None:
    num_requests = len(walked.counts)
    for i in range(num_requests):
        is_there, position = bool(state.flags[i]), int(state.positions[i]) + step
        last = i * rows_each + rows_each - 1
        for row in range(i * rows_each, last + 1):
            at = position - (last - row)
            is_fed = is_there and (row == last or int(walked.counts[i]) > 1)
            token = state.tokens[i] if row == last else walked.next_tokens[i, -2]
            slot = inputs.block_tables[i, at // block_size] * block_size + at % block_size if is_fed else -1
            inputs.token_ids[row] = token if is_fed and step == 0 else 0
            inputs.follows[row] = i if is_fed and step > 0 else -1
            inputs.positions[row], inputs.context_lens[row] = (at, at + 1) if is_fed else (0, 0)
            inputs.slots[row], inputs.parents[row], inputs.is_node[row], inputs.req_ids[row] = slot, -1, 0, i
        inputs.logits_rows[i], inputs.draw_positions[i] = last, position + 1
        inputs.seeds[i] = state.seeds[i]
        inputs.temperatures[i] = 0.0 if greedy else state.temperatures[i]
    counts = [num_requests * rows_each, num_requests, num_requests]
    inputs.counts.copy_(torch.tensor(counts, dtype=torch.int32))
