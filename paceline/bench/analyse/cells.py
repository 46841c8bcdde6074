"""From records to the figures that people ask for: speedups with intervals, the best setting of each cell, and where
the model of the lab agrees with the measurement.

A *point* is a workload, a temperature and a load; a *cell* is a setting at a point. Speedups are taken within a repeat,
against the plain run of the same repeat, so that both saw the same machine.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.analyse.intervals import Median, median
from paceline.bench.run.grid import COLD, WARM
from paceline.bench.run.results import Record
from paceline.errors import InvalidOptionError

PLAIN = "plain"


@dataclass(frozen=True, slots=True, order=True)
class Point:
    workload: str
    temperature: float
    concurrency: int = 0  # 0: open loop
    rate_per_s: float = 0.0

    @property
    def load_name(self) -> str:
        return f"{self.concurrency}" if self.concurrency else f"{self.rate_per_s:g}/s"

    @property
    def load_text(self) -> str:
        if not self.concurrency:
            return f"{self.rate_per_s:g} requests/s"
        return "1 user" if self.concurrency == 1 else f"{self.concurrency} users"


@dataclass(slots=True)
class CellResult:
    setting: str
    point: Point
    records: list[Record] = field(default_factory=list)  # one per repeat, none of them failed
    speedups: list[float] = field(default_factory=list)  # one per repeat that has a plain run

    @property
    def tokens_per_s(self) -> Median:
        return median([record["summary"]["tokens_per_s"] for record in self.records])

    @property
    def tokens_per_s_per_user(self) -> float:
        values = [record["summary"]["tokens_per_s_per_user"] for record in self.records]
        known = [value for value in values if value is not None]
        return median(known).value if known else 0.0

    @property
    def speedup(self) -> Median | None:
        return median(self.speedups) if self.speedups else None

    def over(self, other: "CellResult") -> list[float]:
        """How many times faster than the other setting, in each repeat that has both: they saw the same machine."""
        seen = {record["cell"]["repeat"]: record["summary"]["tokens_per_s"] for record in other.records}
        own = [(record["cell"]["repeat"], record["summary"]["tokens_per_s"]) for record in self.records]
        return [speed / seen[repeat] for repeat, speed in own if repeat in seen]

    @property
    def method(self) -> str:
        config = self.records[0]["cell"]["speculative_config"]
        return self.setting if config is None or self.setting == PLAIN else str(config["method"])

    @property
    def num_speculative_tokens(self) -> int | None:
        config = self.records[0]["cell"]["speculative_config"]
        return None if config is None else config.get("num_speculative_tokens")

    def mean_of(self, *path: str) -> float | None:
        """The mean over repeats of a figure inside the summary."""
        values = []
        for record in self.records:
            value: Any = record["summary"]
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                values.append(float(value))
        return sum(values) / len(values) if values else None


@dataclass(slots=True)
class Analysis:
    cells: dict[tuple[str, Point], CellResult]
    failed: list[Record]

    @property
    def points(self) -> list[Point]:
        return sorted({point for _, point in self.cells})

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(setting for setting, _ in self.cells))

    def at(self, point: Point) -> list[CellResult]:
        return [cell for (_, where), cell in self.cells.items() if where == point]

    def different_outputs(self) -> list[str]:
        """Cells whose outputs were not those of the plain run: exactness, checked on the side."""
        bad = []
        for (setting, point), cell in self.cells.items():
            plain = self.cells.get((PLAIN, point))
            if plain is None or setting == PLAIN:
                continue
            if _outputs(cell.records[0]) != _outputs(plain.records[0]):
                bad.append(f"{setting} at {point.workload}, T={point.temperature:g}, load {point.load_name}")
        return bad


def analyse(records: Sequence[Record], start: str | None = None) -> Analysis:
    """Runs of engines that started this way; None: warm ones, or cold ones where there are no others."""
    if start is None:
        start = WARM if any(_start_of(record) == WARM for record in records) else COLD
    records = [record for record in records if _start_of(record) == start]
    good = [record for record in records if record["status"] == "ok"]
    if not good:
        raise InvalidOptionError("there is no successful run in the records: nothing to report")
    cells: dict[tuple[str, Point], CellResult] = {}
    for record in good:
        cell = record["cell"]
        point = Point(cell["workload"], cell["temperature"], cell["concurrency"] or 0, cell["rate_per_s"] or 0.0)
        result = cells.setdefault((cell["setting"], point), CellResult(cell["setting"], point))
        result.records.append(record)
    for result in cells.values():
        plain = cells.get((PLAIN, result.point))
        if plain is not None:
            result.speedups = result.over(plain)
    return Analysis(cells, [record for record in records if record["status"] != "ok"])


def _start_of(record: Record) -> str:
    return str(record["cell"].get("start", WARM))


def table(analysis: Analysis) -> list[dict[str, Any]]:
    """One row per cell, ready to print."""
    rows = []
    for point in analysis.points:
        for cell in analysis.at(point):
            speed, factor = cell.tokens_per_s, cell.speedup
            rows.append(
                {
                    "workload": point.workload,
                    "T": point.temperature,
                    "load": point.load_name,
                    "setting": cell.setting,
                    "tok/s": round(speed.value, 1),
                    "user tok/s": round(cell.tokens_per_s_per_user, 1),
                    "speedup": None if factor is None else round(factor.value, 3),
                    "interval": None if factor is None else f"{factor.low:.2f}..{factor.high:.2f}",
                    "tokens/pass": cell.mean_of("speculation", "mean_acceptance_length"),
                    "accepted": cell.mean_of("speculation", "draft_acceptance_rate"),
                    "TTFT p50": cell.mean_of("ttft_s", "p50"),
                    "ITL p95": cell.mean_of("inter_token_s", "p95"),
                    "E2E p99": cell.mean_of("e2e_s", "p99"),
                }
            )
    return rows


def by_category(analysis: Analysis) -> dict[str, dict[str, float]]:
    """setting -> category -> speedup of the users' speed, over all points with a plain run, mean."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (setting, point), cell in analysis.cells.items():
        plain = analysis.cells.get((PLAIN, point))
        if plain is None or setting == PLAIN:
            continue
        for category in cell.records[0]["summary"]["by_category"]:
            own = cell.mean_of("by_category", category, "tokens_per_s_per_user")
            base = plain.mean_of("by_category", category, "tokens_per_s_per_user")
            if own and base:
                sums[setting][category].append(own / base)
    return {
        setting: {category: sum(values) / len(values) for category, values in categories.items()}
        for setting, categories in sums.items()
    }


def _outputs(record: Record) -> list[tuple[str, str]]:
    return [(request["prompt_id"], request.get("output_hash", "")) for request in record.get("requests", ())]
