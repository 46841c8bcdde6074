"""What the target really said, kept for replay: prompts, outputs, and its likeliest tokens at every position.

One JSON line per request. The likeliest tokens are what token recycling learns from; everything else that a drafter
without a network needs is the tokens themselves.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.bench.backend import Sampling
from paceline.bench.workloads import Prompt
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError
from paceline.llm import LLM

NUM_TOP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request: what was asked and what the target answered."""

    prompt_id: str
    category: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    top_token_ids: list[list[int]]  # [output position][rank]: the target's likeliest tokens there
    temperature: float
    vocab_size: int
    seed: int = 0


def record(llm: LLM, prompts: Sequence[Prompt], sampling: Sampling) -> list[Recorded]:
    """Run the prompts (together, as the engine batches them) and keep what the target said."""
    params = [
        SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed + i,
            ignore_eos=sampling.ignore_eos,
            logprobs=NUM_TOP_TOKENS,
        )
        for i in range(len(prompts))
    ]
    tokenizer = llm.get_tokenizer()
    chat = getattr(tokenizer, "has_chat_template", False)
    asked = [llm.chat_prompt([{"role": "user", "content": p.text}]) if p.chat and chat else p.text for p in prompts]
    vocab_size = llm.engine.model.decoder.config.vocab_size
    recorded = []
    for i, (prompt, output) in enumerate(zip(prompts, llm.generate(asked, params), strict=True)):
        if output.error is not None:
            raise output.error
        completion = output.outputs[0]
        assert completion.logprobs is not None
        recorded.append(
            Recorded(
                prompt.prompt_id,
                prompt.category,
                list(output.prompt_token_ids),
                list(completion.token_ids),
                [list(position.top) for position in completion.logprobs],
                sampling.temperature,
                vocab_size,
                sampling.seed + i,
            )
        )
    return recorded


def save_recording(recorded: Sequence[Recorded], path: str | Path) -> None:
    Path(path).write_text("".join(json.dumps(asdict(one)) + "\n" for one in recorded), encoding="utf-8")


def load_recording(path: str | Path) -> list[Recorded]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [Recorded(**json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidOptionError(
            f"{path} is not a recording (make one with `paceline bench record`): {error}"
        ) from error
