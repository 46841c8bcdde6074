"""`LLM.get_metrics()`: what Prometheus would be told, as objects. Names are vLLM's under our prefix, less `_total`.

>>> for metric in llm.get_metrics():                                                # doctest: +SKIP
...     print(metric.name, metric.value if isinstance(metric, Counter | Gauge) else metric)
"""

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from paceline.core.outputs import RequestMetrics

PREFIX = "paceline:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """A counter for each place, such as the depth of a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> how many were at most so large


class _Observed:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # [i]: values in (bounds[i-1], bounds[i]]; the last one is open
        self._sum = 0.0

    def add(self, value: float | None) -> None:
        if value is not None:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += value

    def metric(self, name: str, labels: dict[str, str]) -> Histogram:
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        counts = dict(zip(names, accumulate(self._counts), strict=True))
        return Histogram(PREFIX + name, labels, counts["+Inf"], self._sum, counts)


class FinishedRequests:
    """Counted when a request ends, never while it runs."""

    def __init__(self) -> None:
        self._counts = {"prompt_tokens": 0, "generation_tokens": 0, "prompt_tokens_cached": 0}
        self._reasons: dict[str, int] = {}
        self._observed = {
            "time_to_first_token_seconds": _Observed(SECONDS),
            "request_time_per_output_token_seconds": _Observed(SECONDS),
            "e2e_request_latency_seconds": _Observed(SECONDS),
            "request_queue_time_seconds": _Observed(SECONDS),
            "request_prompt_tokens": _Observed(TOKENS),
            "request_generation_tokens": _Observed(TOKENS),
        }

    def add(self, reasons: Iterable[str | None], metrics: RequestMetrics | None) -> None:
        """`reasons`: why each sample of a call ended."""
        if metrics is None:
            return
        for reason in reasons:
            self._reasons[reason or "abort"] = self._reasons.get(reason or "abort", 0) + 1
        self._counts["prompt_tokens"] += metrics.num_prompt_tokens
        self._counts["generation_tokens"] += metrics.num_output_tokens
        self._counts["prompt_tokens_cached"] += metrics.num_cached_tokens
        for name, value in _observations(metrics):
            self._observed[name].add(value)

    def metrics(self, labels: dict[str, str]) -> Iterable[Metric]:
        for name, value in self._counts.items():
            yield Counter(PREFIX + name, labels, value)
        for reason, value in self._reasons.items():
            yield Counter(PREFIX + "request_success", labels | {"finished_reason": reason}, value)
        for name, observed in self._observed.items():
            yield observed.metric(name, labels)


def _observations(metrics: RequestMetrics) -> Iterable[tuple[str, float | None]]:
    yield "time_to_first_token_seconds", metrics.ttft_s
    yield "request_time_per_output_token_seconds", metrics.tpot_s
    yield "e2e_request_latency_seconds", metrics.e2e_s
    yield "request_queue_time_seconds", metrics.queue_s
    yield "request_prompt_tokens", metrics.num_prompt_tokens
    yield "request_generation_tokens", metrics.num_output_tokens


def speculation_metrics(speculation: Mapping[str, Any], labels: dict[str, str]) -> Iterable[Metric]:
    """`speculation`: method -> counts, as spec/statistics.py gives them; all methods together, as vLLM has one."""
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        total = sum(stats[name] for stats in speculation.values())
        yield Counter(f"{PREFIX}spec_decode_{name}", labels, total)
    depth = max((len(stats["accepted_per_position"]) for stats in speculation.values()), default=0)
    values = [0] * depth
    for stats in speculation.values():
        for position, count in enumerate(stats["accepted_per_position"]):
            values[position] += count
    yield Vector(PREFIX + "spec_decode_num_accepted_tokens_per_pos", labels, values)
