"""The pass cost curve of a model on this machine: what a step of n rows takes, everything included.

One request decodes with drafts that are wrong on purpose (the oracle with accuracy 0), so every step has exactly
1 + K rows and emits one token. The time of a step is then the time of a pass of 1 + K rows with all that the engine
does around it. The median over steps is taken, and several rounds go through all sizes in turn. Every row reads the
context before it, so the context is as long as a short conversation's, not empty.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError
from paceline.lab.pass_cost import PassCost
from paceline.llm import LLM

PROMPT = "Once upon a time, in a village by the sea, there lived a baker who"  # again and again
CONTEXT = 128  # tokens
DEFAULT_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)


def measure_curve(
    model: Any,  # a name, or a loaded model
    rows: Sequence[int] = DEFAULT_ROWS,
    *,
    num_tokens: int = 24,
    context: int = CONTEXT,
    num_rounds: int = 3,
    temperature: float = 0.0,
    **options: Any,  # of LLM
) -> PassCost:
    if not rows or min(rows) < 1:
        raise InvalidOptionError(f"a pass has 1 row or more, got {list(rows)}")
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=0)
    plain = LLM(model, {"method": "none"}, **options)
    once = plain.get_tokenizer().encode(PROMPT)
    prompt = {"prompt_token_ids": (once * (context // len(once) + 1))[: max(1, context)]}
    output = plain.generate(prompt, params)[0]
    sequence = output.prompt_token_ids + output.outputs[0].token_ids
    times: dict[int, list[float]] = defaultdict(list)
    for _ in range(num_rounds):
        for count in sorted(set(rows)):
            llm = plain if count == 1 else LLM(plain.engine.model, _wrong_drafts(sequence, count - 1), **options)
            times[count].append(_step_s(llm, prompt, params))
    return PassCost.of({count: min(values) for count, values in times.items()})


def _wrong_drafts(sequence: list[int], num_nodes: int) -> dict[str, Any]:
    """All of the drafts hang on the last token: a star verifies like any tree and never runs out of depth."""
    return {
        "method": "oracle",
        "sequences": [sequence],
        "accuracy": 0.0,
        "shape": [num_nodes] if num_nodes <= 64 else [64, num_nodes // 64 + 1],
        "num_speculative_tokens": 2,
        "node_budget": num_nodes,
    }


def _step_s(llm: LLM, prompt: Any, params: SamplingParams) -> float:
    """The median time of a decode step; the first ones read the prompt and warm the caches."""
    moments: list[float] = []
    llm.generate(prompt, params, on_step=lambda done, total: moments.append(time.perf_counter()))
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return statistics.median(gaps[2:-1])
