"""How quickly `auto` follows a change: random text, then repetitive text, then random again, in one running engine.

Random text is sampled at temperature 1: greedy decoding of nonsense soon repeats itself, which is not random at all.

In each phase all requests start together. The same phase is also run with every fixed setting on an engine of its own;
the best of them is what auto should reach. Speeds are compared over windows of steps counted from the phase's start.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.run.backend import Sampling
from paceline.bench.run.engine_backend import asked, sampling_params
from paceline.bench.run.grid import parse_setting
from paceline.bench.workloads.workload import Prompt, take
from paceline.llm import LLM

PHASES = (("random", 1.0), ("repetitive", 0.0), ("random", 1.0))  # workload, temperature
WITHIN_STEPS, WINDOW, LEAST_WINDOW, SHARE = 50, 25, 5, 0.9  # steps; share of the best fixed setting's speed


@dataclass(frozen=True, slots=True)
class PhaseResult:
    workload: str
    best: str
    best_tokens_per_s: float  # of the best fixed setting, after WITHIN_STEPS
    auto_tokens_per_s: float  # of auto, over the same steps
    reached_after: int | None  # first step from which a window of auto is at SHARE of the best

    @property
    def holds(self) -> bool:
        return self.reached_after is not None and self.reached_after <= WITHIN_STEPS

    def row(self) -> dict[str, Any]:
        return {
            "phase": self.workload,
            "best fixed": self.best,
            "best tok/s": round(self.best_tokens_per_s, 1),
            "auto tok/s": round(self.auto_tokens_per_s, 1),
            "share": round(self.auto_tokens_per_s / self.best_tokens_per_s, 3),
            f"steps to {SHARE:.0%}": self.reached_after,
            "holds": "yes" if self.holds else "NO",
        }


def measure_adaptation(
    model: str,
    settings: Sequence[str],  # fixed ones to compare with
    *,
    concurrency: int = 1,
    sampling: Sampling | None = None,  # its temperature is each phase's own
    phases: Sequence[tuple[str, float]] = PHASES,
    **options: Any,
) -> list[PhaseResult]:
    sampling = sampling or Sampling(max_tokens=400)
    auto = LLM(model, {"method": "auto"}, **options)
    loaded = auto.engine.model
    results = []
    for number, (workload, temperature) in enumerate(phases):
        prompts = take(workload, concurrency, skip=number * concurrency)
        of_phase = replace(sampling, temperature=temperature)
        traces = {"auto": _trace(auto, prompts, of_phase)}
        for name in settings:
            fixed = LLM(loaded, parse_setting(name).config, **options)
            traces[name] = _trace(fixed, prompts, of_phase)
        results.append(compare(workload, traces))
    return results


def _trace(llm: LLM, prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[float, int]]:
    """(seconds since the start, tokens so far) after every step."""
    params = [sampling_params(sampling, i, prompt) for i, prompt in enumerate(prompts)]
    questions = [asked(prompt, llm.get_tokenizer()) for prompt in prompts]
    before, begin_s = _emitted(llm), time.perf_counter()
    trace: list[tuple[float, int]] = []
    llm.generate(
        questions,
        params,
        on_step=lambda done, total: trace.append((time.perf_counter() - begin_s, _emitted(llm) - before)),
    )
    return trace


def _emitted(llm: LLM) -> int:
    return sum(method["num_emitted_tokens"] for method in llm.stats()["speculation"].values())


def compare(workload: str, traces: dict[str, list[tuple[float, int]]]) -> PhaseResult:
    """`traces`: setting -> (seconds, tokens so far) after every step; one of them is auto."""
    late = {name: speed_between(trace, WITHIN_STEPS, None) for name, trace in traces.items()}
    best = max((name for name in traces if name != "auto"), key=lambda name: late[name])
    own = traces["auto"]
    fast = (
        begin
        for begin in range(len(own) - LEAST_WINDOW)
        if speed_between(own, begin, begin + WINDOW) >= SHARE * late[best]
    )
    return PhaseResult(workload, best, late[best], late["auto"], next(fast, None))


def speed_between(trace: Sequence[tuple[float, int]], begin: int, end: int | None) -> float:
    """Tokens per second between two steps; a run that is over by then is judged by its second half."""
    begin = begin if begin + LEAST_WINDOW < len(trace) else len(trace) // 2
    end = len(trace) - 1 if end is None else min(end, len(trace) - 1)
    if end <= begin:
        return 0.0
    (begin_s, begin_tokens), (end_s, end_tokens) = trace[begin], trace[end]
    return (end_tokens - begin_tokens) / (end_s - begin_s)
