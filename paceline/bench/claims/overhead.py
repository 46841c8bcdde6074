"""The controller's own time, as a share of the step: without the drafting itself.

Of a running engine: other prompts of the workload go before, so that it knows what passes and drafts cost. The figure
is the median over several groups of requests: a shared machine may give the processor to others for 8 ms, which
would otherwise double the figure of what it interrupted."""

from collections.abc import Sequence
from typing import Any

from paceline.bench.workloads.workload import take
from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM

LIMIT = 0.01
WARM_UP_REQUESTS = 4
NUM_GROUPS, LARGE_BATCH, NUM_LARGE_GROUPS = 7, 8, 3  # of a large batch fewer, because no prompt should come twice


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
            num_warm_up = -(-WARM_UP_REQUESTS // batch)
            for number in range(num_warm_up):
                llm.generate([prompt.text for prompt in take(workload, batch, skip=number * batch)], params)
            groups = []
            for number in range(NUM_GROUPS if batch < LARGE_BATCH else NUM_LARGE_GROUPS):
                before = _totals(llm)
                prompts = take(workload, batch, skip=(num_warm_up + number) * batch)
                llm.generate([prompt.text for prompt in prompts], params)
                step_s, own_s, count = (now - then for now, then in zip(_totals(llm), before, strict=True))
                groups.append((own_s / step_s, own_s / count, step_s / count))
            share, own_s, step_s = sorted(groups)[len(groups) // 2]
            rows.append(
                {
                    "workload": workload,
                    "batch": batch,
                    "step ms": round(1e3 * step_s, 3),
                    "controller ms": round(1e3 * own_s, 4),
                    "share": round(share, 5),
                    "holds": "yes" if share <= LIMIT else "NO",
                }
            )
    return rows


def _totals(llm: LLM) -> tuple[float, float, int]:
    """Seconds of all steps, the controller's part of them, and their number."""
    stats = llm.stats()
    own_s = stats["speculation"]["auto"]["decisions"]["own_s"]
    return sum(stats["step_seconds"].values()), own_s, stats["num_steps"]
