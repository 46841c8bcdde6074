"""What a call cost and what speculation did for it, as parts of an answer."""

from collections.abc import Sequence
from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.call import Call
from paceline.serve.generate.deltas import Cursor

PREDICTION = "prediction"  # the member that drafts from the client's expected text


def usage(call: Call, cursors: Sequence[Cursor]) -> dict[str, Any]:
    """OpenAI's token counts. Of a prediction: its draft tokens that were accepted, and those that were rejected."""
    num_prompt = sum(len(prompt) for prompt in call.prompts)
    num_completion = sum(cursor.num_tokens for cursor in cursors)
    predicted = [counts.by_member[PREDICTION] for counts in call.counts if PREDICTION in counts.by_member]
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(m.num_cached_tokens for m in call.metrics.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(counts.num_accepted_tokens for counts in predicted),
            "rejected_prediction_tokens": sum(counts.num_wasted_tokens for counts in predicted),
        },
    }


def speculation(call: Call) -> dict[str, Any]:
    """All prompts of the call together."""
    counts = DraftCounts.total(m.counts for m in call.metrics.values())
    return {
        "num_steps": counts.num_steps,
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "accepted_per_position": counts.accepted_per_position,
        "acceptance_histogram": acceptance_histogram(counts.num_steps, counts.accepted_per_position),
        "lossy": any(m.lossy for m in call.metrics.values()),
    }


def acceptance_histogram(num_steps: int, per_position: Sequence[int]) -> list[int]:
    """[k]: steps that accepted exactly k draft tokens. At least k + 1 were accepted in `per_position[k]` steps."""
    at_least = [num_steps, *per_position, 0]
    return [at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)]


def prompt_logprobs(call: Call, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's form, one entry per prompt token: token id -> its log-probability, rank and text."""
    entries: list[dict[str, Any] | None] = []
    for prompt in range(len(call.prompts)):
        for entry in call.prompt_logprobs[prompt]:
            if entry is None:
                entries.append(None)
                continue
            ranked = {token_id: (logprob, rank + 1) for rank, (token_id, logprob) in enumerate(entry.top.items())}
            ranked[entry.token_id] = (entry.logprob, entry.rank)
            entries.append(
                {
                    str(token_id): {
                        "logprob": max(logprob, -9999.0), "rank": rank, "decoded_token": tokenizer.token_text(token_id)
                    }
                    for token_id, (logprob, rank) in ranked.items()
                }
            )  # fmt: skip
    return entries
