"""What a call cost and what speculation did for it, as parts of an answer."""

from collections.abc import Sequence
from typing import Any

from paceline.core.outputs import RequestMetrics
from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.deltas import Cursor
from paceline.serve.generate.service import Call

PREDICTION = "prediction"  # the member that drafts from the client's expected text


def usage(call: Call, cursors: Sequence[Cursor]) -> dict[str, Any]:
    """OpenAI's token counts. Of a prediction: draft tokens of it that were accepted, and verified in vain."""
    num_prompt = sum(len(prompt) for prompt in call.prompts)
    num_completion = sum(cursor.num_tokens for cursor in cursors)
    accepted = sum(counts.accepted.get(PREDICTION, 0) for counts in call.member_counts)
    drafted = sum(counts.drafted.get(PREDICTION, 0) for counts in call.member_counts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(m.num_cached_tokens for m in call.metrics.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def speculation(call: Call) -> dict[str, Any]:
    """All prompts of the call together."""
    parts = list(call.metrics.values())
    num_steps = sum(m.num_steps for m in parts)
    num_output_tokens = sum(m.num_output_tokens for m in parts)
    num_draft_tokens = sum(m.num_draft_tokens for m in parts)
    num_accepted_tokens = sum(m.num_accepted_tokens for m in parts)
    per_position = accepted_per_position(parts)
    return {
        "num_steps": num_steps,
        "num_drafts": sum(m.num_drafts for m in parts),
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "mean_acceptance_length": num_output_tokens / num_steps if num_steps else 0.0,
        "draft_acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else 0.0,
        "accepted_per_position": per_position,
        "acceptance_histogram": acceptance_histogram(num_steps, per_position),
        "lossy": any(m.lossy for m in parts),
    }


def accepted_per_position(parts: Sequence[RequestMetrics]) -> list[int]:
    depth = max((len(m.accepted_per_position) for m in parts), default=0)
    return [sum(m.accepted_per_position[i] for m in parts if i < len(m.accepted_per_position)) for i in range(depth)]


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
