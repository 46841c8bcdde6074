"""Expected tokens per step, measured in the engine with a drafter of known accuracy.

The target's outputs are generated first. The oracle then drafts them with a chosen chance of being right at each
position, and the engine decodes the same prompts again: tokens per pass must be the formula's, within its error.
"""

import math
from collections.abc import Sequence

from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM

PROMPT = "Once upon a time there was a harbour where"
NUM_ROUNDS = 4  # with other mistakes each time; within a round a position is drafted the same way every time


def measure_oracle(
    model: str, rates: Sequence[float], ks: Sequence[int], num_tokens: int, seed: int
) -> dict[tuple[float, int], tuple[float, float]]:
    """(acceptance, K) -> (tokens per step, its standard error)."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    plain = LLM(model, {"method": "none"})
    output = plain.generate(PROMPT, params)[0]
    sequence = output.prompt_token_ids + output.outputs[0].token_ids
    measured = {}
    for rate in rates:
        for k in ks:
            rounds = [_one_round(plain, sequence, params, rate, k, seed + i) for i in range(NUM_ROUNDS)]
            num_drafts, num_accepted = (sum(counts) for counts in zip(*rounds, strict=True))
            measured[rate, k] = (1 + num_accepted / num_drafts, _standard_error(rate, k, num_drafts))
    return measured


def _one_round(
    plain: LLM, sequence: list[int], params: SamplingParams, rate: float, k: int, seed: int
) -> tuple[int, int]:
    """(steps that verified a draft, tokens accepted in them)."""
    config = {
        "method": "oracle",
        "sequences": [sequence],
        "accuracy": rate,
        "num_speculative_tokens": k,
        "node_budget": k,
        "seed": seed,
    }
    metrics = LLM(plain.engine.model, config).generate(PROMPT, params)[0].metrics
    assert metrics is not None
    # The last few drafts are cut to what max_tokens leaves: a bias of about K tokens in num_tokens.
    return metrics.num_drafts, metrics.num_accepted_tokens


def _standard_error(rate: float, k: int, num_drafts: int) -> float:
    reach = [rate**i for i in range(1, k + 1)]
    second = sum((2 * i - 1) * chance for i, chance in enumerate(reach, 1))  # E[accepted^2], cut off at K
    return math.sqrt(max(0.0, second - sum(reach) ** 2) / num_drafts)
