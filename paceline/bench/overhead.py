"""The controller's own time, as a share of the step: without the drafters, which it pays only where they earn it.

Of a running engine: other prompts of the workload go before, so that it knows what passes and drafts cost."""

from collections.abc import Sequence
from typing import Any

from paceline.bench.workloads import take
from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM

LIMIT = 0.01
WARM_UP_REQUESTS, LEAST_REQUESTS = 4, 4


def measure_overhead(
    model: str, batches: Sequence[int], workloads: Sequence[str], num_tokens: int, **options: Any
) -> list[dict[str, Any]]:
    rows = []
    loaded: Any = model
    for workload in workloads:
        for batch in batches:
            llm = LLM(loaded, {"method": "auto"}, **options)
            loaded = llm.engine.model
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            for skip in range(batch, max(batch, WARM_UP_REQUESTS) + batch, batch):
                llm.generate([prompt.text for prompt in take(workload, batch, skip=skip)], params)
            before_step_s, before_own_s, before = _totals(llm)
            for skip in range(0, max(batch, LEAST_REQUESTS), batch):
                llm.generate([prompt.text for prompt in take(workload, batch, skip=100 + skip)], params)
            step_s, own_s, count = _totals(llm)
            step_s, own_s = (step_s - before_step_s) / (count - before), (own_s - before_own_s) / (count - before)
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


def _totals(llm: LLM) -> tuple[float, float, int]:
    """Seconds of all steps, the controller's part of them, and their number."""
    stats = llm.stats()
    own_s = stats["speculation"]["auto"]["decisions"]["own_s"]
    return sum(stats["step_seconds"].values()), own_s, stats["num_steps"]
