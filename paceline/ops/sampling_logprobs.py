"""Log-probabilities for the caller: the model's own, before any option changed them (as vLLM reports them)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.outputs import TokenLogprobs


def token_logprobs(
    logits: Tensor,  # [rows, vocab], straight from the model
    token_ids: Sequence[int],  # [rows]: the token that came after each row
    num_top: int,  # how many of the likeliest tokens to report beside it; -1: all
) -> list[TokenLogprobs]:
    """One entry per row. For prompts: the rows of positions [0, n - 1) with the tokens at [1, n)."""
    if not token_ids:
        return []
    logprobs = logits.log_softmax(-1)  # each row on its own: the same bits in any batch
    chosen_ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids)  # [rows, 1]
    ranks = (logprobs > chosen).sum(-1) + 1
    vocab_size = logits.shape[-1]
    top = logprobs.topk(vocab_size if num_top < 0 else min(num_top, vocab_size), dim=-1)  # likeliest first
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, dict(zip(ids, values, strict=True)))
        for token, (logprob,), rank, (ids, values) in zip(token_ids, chosen.tolist(), ranks.tolist(), tops, strict=True)
    ]
