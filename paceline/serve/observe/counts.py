"""Counters and histograms that cost a dictionary's or a list's entry; `prometheus_client` writes them down.

Its own have a lock, and observe one value at a time: here one step's tokens are observed at once, from one thread.

>>> tokens = Counter("demo_tokens_total", "tokens made", ("model",))
>>> tokens.inc(3, "toy")
>>> tokens.total()
3
"""

import bisect
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
MODEL = "model_name"  # the label that every sample has


class Counter:
    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}

    def inc(self, by: float = 1, *labels: str) -> None:
        assert len(labels) == len(self._labels)
        self._values[labels] = self._values.get(labels, 0) + by

    def total(self) -> float:
        return sum(self._values.values())

    def family(self, model: str) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name, self._help, labels=(MODEL, *self._labels))
        for labels, value in self._values.items():
            family.add_metric((model, *labels), value)
        return family


class Histogram:
    def __init__(self, name: str, help: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> None:
        self._name, self._help, self._buckets = name, help, tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)  # [i]: values in (buckets[i-1], buckets[i]]; the last one is open
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def quantile(self, q: float) -> float | None:
        """An upper bound: the end of the bucket that holds the q-quantile."""
        rank, seen = q * sum(self._counts), 0
        for count, bound in zip(self._counts, self._buckets, strict=False):
            seen += count
            if seen and seen >= rank:
                return bound
        return None

    def family(self, model: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._name, self._help, labels=(MODEL,))
        buckets, seen = [], 0
        for count, bound in zip(self._counts, [*(f"{bound:g}" for bound in self._buckets), "+Inf"], strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric((model,), buckets, self._sum)
        return family
