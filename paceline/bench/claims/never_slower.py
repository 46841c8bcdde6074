"""The claim "never slower", as a table: auto against plain and against the best fixed setting, in every cell."""

from dataclasses import dataclass
from typing import Any

from paceline.bench.analyse.cells import Analysis, Point
from paceline.bench.analyse.intervals import median
from paceline.lab.charts import HeatMap

AUTO = "auto"
LEAST_OF_PLAIN, LEAST_OF_BEST = 0.97, 0.95
DEFAULT_SETTINGS = ("plain", "auto", "ngram:2", "ngram:4", "suffix:4", "suffix:8", "suffix:16")
WITH_SHIPPED_DRAFTER = ("eagle3",)  # as well, on a model that has one: auto has it as a member
QUICK_SETTINGS, QUICK_TOKENS = ("plain", "auto", "suffix:4", "suffix:16"), 64


def requests_for(num_users: int) -> int:
    """Enough for some seconds of each side, whatever the number of users: a comparison to a hundredth needs them."""
    return max(16, min(12 * num_users, 48), 2 * num_users)


@dataclass(frozen=True, slots=True)
class Verdict:
    point: Point
    of_plain: float  # median over repeats of auto / plain
    of_best: float  # median over repeats of auto / the best of plain and the fixed settings
    best: str  # the one with the largest median of its speedups over plain

    @property
    def holds(self) -> bool:
        return self.of_plain >= LEAST_OF_PLAIN and self.of_best >= LEAST_OF_BEST

    def row(self) -> dict[str, Any]:
        return {
            "workload": self.point.workload,
            "T": self.point.temperature,
            "concurrency": self.point.load_name,
            "auto / plain": round(self.of_plain, 3),
            "best fixed": self.best,
            "auto / best": round(self.of_best, 3),
            "holds": "yes" if self.holds else "NO",
        }


def verdicts(analysis: Analysis) -> list[Verdict]:
    """One per point where auto, plain and at least one fixed setting were measured."""
    fixed = [setting for setting in analysis.settings if setting != AUTO]
    result = []
    for point in analysis.points:
        auto = analysis.cells.get((AUTO, point))
        others = [(cell.speedup.value, cell) for cell in analysis.at(point) if cell.setting in fixed and cell.speedup]
        if auto is None or auto.speedup is None or not others:
            continue
        _, best = max(others, key=lambda other: other[0])
        ratios = auto.over(best)
        if ratios:
            result.append(Verdict(point, auto.speedup.value, median(ratios).value, best.setting))
    return result


def heat_map(found: list[Verdict]) -> HeatMap:
    """auto over plain: workloads and temperatures down, concurrency across."""
    rows = sorted({(v.point.workload, v.point.temperature) for v in found})
    columns = sorted({v.point.concurrency for v in found})
    value = {((v.point.workload, v.point.temperature), v.point.concurrency): v.of_plain for v in found}
    return HeatMap(
        "auto over plain decoding",
        "concurrency",
        "",
        [str(column) for column in columns],
        [f"{workload}, T={temperature:g}" for workload, temperature in rows],
        [[value.get((row, column)) for column in columns] for row in rows],
    )
