"""Counters and histograms in Prometheus' text form, without a client library.

>>> tokens = Counter("demo_tokens_total", "tokens made", ("model",))
>>> tokens.inc(3, "toy")
>>> print(render([tokens.family()]), end="")
# HELP demo_tokens_total tokens made
# TYPE demo_tokens_total counter
demo_tokens_total{model="toy"} 3
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LATENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass(frozen=True, slots=True)
class Sample:
    labels: tuple[tuple[str, str], ...]
    value: float
    suffix: str = ""  # _bucket, _sum, _count


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    kind: str  # counter, gauge, histogram
    help: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float, **labels: str) -> None:
        self.samples.append(Sample(tuple(labels.items()), value))


class Counter:
    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {}

    def inc(self, by: float = 1, *labels: str) -> None:
        assert len(labels) == len(self._labels)
        self._values[labels] = self._values.get(labels, 0) + by

    def total(self) -> float:
        return sum(self._values.values())

    def family(self) -> Family:
        samples = [Sample(tuple(zip(self._labels, key, strict=True)), value) for key, value in self._values.items()]
        return Family(self._name, "counter", self._help, samples)


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

    def family(self) -> Family:
        family = Family(self._name, "histogram", self._help)
        seen = 0
        for count, bound in zip(self._counts, [*map(_number, self._buckets), "+Inf"], strict=True):
            seen += count
            family.samples.append(Sample((("le", bound),), seen, "_bucket"))
        family.samples.append(Sample((), self._sum, "_sum"))
        family.samples.append(Sample((), seen, "_count"))
        return family


def render(families: Iterable[Family], **common: str) -> str:
    """The text a scraper reads; `common` labels (the model's name) go on every sample."""
    return "".join(line + "\n" for family in families for line in _lines(family, tuple(common.items())))


def _lines(family: Family, common: tuple[tuple[str, str], ...]) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for sample in family.samples:
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in (*common, *sample.labels))
        braces = f"{{{labels}}}" if labels else ""
        yield f"{family.name}{sample.suffix}{braces} {_number(sample.value)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
