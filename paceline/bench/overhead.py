"""The controller's own time, as a share of the step: without the drafters, which it pays only where they earn it."""

from collections.abc import Sequence
from typing import Any

from paceline.bench.workloads import take
from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM

LIMIT = 0.01


def measure_overhead(
    model: str, batches: Sequence[int], workloads: Sequence[str], num_tokens: int, **options: Any
) -> list[dict[str, Any]]:
    rows = []
    loaded: Any = model
    for workload in workloads:
        for batch in batches:
            llm = LLM(loaded, {"method": "auto"}, **options)
            loaded = llm.engine.model
            prompts = [prompt.text for prompt in take(workload, batch)]
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
            stats = llm.stats()
            decisions = stats["speculation"]["auto"]["decisions"]
            step_s = sum(stats["step_seconds"].values()) / stats["num_steps"]
            own_s = decisions["own_s"] / decisions["steps"]
            rows.append(
                {
                    "workload": workload,
                    "batch": batch,
                    "step ms": round(1e3 * step_s, 3),
                    "controller ms": round(1e3 * own_s, 4),
                    "share": round(own_s / step_s, 5),
                    "holds": "yes" if own_s <= LIMIT * step_s else "NO",
                }
            )
    return rows
