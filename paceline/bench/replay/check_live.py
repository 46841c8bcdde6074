"""A recording's prompts once more through the engine, to see whether the replay agrees with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.replay.recording import Recorded
from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM
from paceline.spec.config.speculative_config import at_default_size

REPLAY_TOLERANCE = 0.03


def live_acceptance_length(
    model: Any,  # a name, or a loaded model
    config: Mapping[str, Any] | None,
    recorded: Sequence[Recorded],
    concurrency: int,
    **options: Any,
) -> tuple[float, Any]:
    """Tokens per pass, and the loaded model for the next call. Requests get the seeds they were recorded with."""
    drafted = at_default_size(config or {"method": "none"})  # as the replay drafts, whether it pays or not
    llm = LLM(model, drafted, max_num_seqs=concurrency, **options)
    params = [
        SamplingParams(
            temperature=one.temperature, max_tokens=len(one.output_token_ids), seed=one.seed, ignore_eos=True
        )
        for one in recorded
    ]
    prompts: list[Any] = [{"prompt_token_ids": one.prompt_token_ids} for one in recorded]
    num_tokens = num_steps = 0
    for output in llm.generate(prompts, params):
        assert output.metrics is not None
        num_tokens += output.metrics.num_output_tokens
        num_steps += output.metrics.num_steps
    return num_tokens / num_steps, llm.engine.model
