"""The claim "never slower", as a table: auto against plain and against the best fixed setting, in every cell.

A cell fails where its whole interval of 95 % lies below the bar; where there are too few rounds for such an interval,
the cell is open, whatever its median. The number of rounds is fixed beforehand for all cells. Single cells of noise
cannot make the claim fail then, and a small loss everywhere could hide in them: so geometric means over cells, for each
temperature and each number of users, have a bar of their own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.analyse.cells import Analysis, CellResult, Point
from paceline.bench.analyse.intervals import Median, median
from paceline.bench.run.grid import WARM
from paceline.lab.charts import HeatMap

AUTO = "auto"
COVERAGE = 0.95
LEAST_OF_PLAIN, LEAST_OF_BEST = 0.97, 0.95  # in each cell; the second one warm
LEAST_MEAN = 1.0  # of plain, for each temperature and each number of users
LEAST_WARM_MEAN = 1.18  # of plain, over all cells of CLAIMED: another grid has another mean
CLAIMED: dict[str, list[Any]] = {
    "workload": ["repetitive", "code", "chat", "random"],
    "temperature": [0.0, 1.0],
    "concurrency": [1, 2, 4, 8, 16, 32],
}
HOLDS, FAILS, OPEN = "yes", "NO", "open"
DEFAULT_SETTINGS = ("plain", "auto", "ngram:2", "ngram:4", "suffix:4", "suffix:8", "suffix:16")
COLD_SETTINGS = ("plain", "auto")  # the claim for cold engines is about these
WITH_SHIPPED_DRAFTER = ("eagle3",)  # as well, on a model that has one: auto has it as a member
QUICK_SETTINGS, QUICK_TOKENS = ("plain", "auto", "suffix:4", "suffix:16"), 64
EARLY_S = 2  # of an engine's own clock: shown apart, because a cold engine finds out most there


def requests_for(num_users: int) -> int:
    """Enough for some seconds of each side, whatever the number of users: a comparison to a hundredth needs them."""
    return max(16, min(12 * num_users, 48), 2 * num_users)


def judge(found: Median, bar: float, num_rounds: int) -> str:
    if found.count < num_rounds or found.coverage < COVERAGE:
        return OPEN
    return FAILS if found.high < bar else HOLDS


@dataclass(frozen=True, slots=True)
class Verdict:
    point: Point
    start: str
    num_rounds: int  # that were planned
    of_plain: Median  # over the rounds: auto / plain
    of_best: Median  # over the rounds: auto / the best of plain and the fixed settings
    best: str  # the one with the largest median of its speedups over plain
    early: float | None  # auto / plain in the first EARLY_S, median; None: it was over before

    @property
    def holds(self) -> str:
        both = {judge(self.of_plain, LEAST_OF_PLAIN, self.num_rounds)}
        if self.start == WARM:
            both.add(judge(self.of_best, LEAST_OF_BEST, self.num_rounds))
        return worst(both)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "start": self.start,
            "workload": self.point.workload,
            "T": self.point.temperature,
            "concurrency": self.point.load_name,
            "rounds": f"{self.of_plain.count} of {self.num_rounds}",
            "auto / plain": round(self.of_plain.value, 3),
            "interval": _text(self.of_plain),
            "covers": f"{self.of_plain.coverage:.0%}",
            f"first {EARLY_S} s": None if self.early is None else round(self.early, 3),
        }
        if self.start == WARM:
            row |= {"best fixed": self.best, "auto / best": round(self.of_best.value, 3)}
            row["its interval"] = _text(self.of_best)
        return row | {"holds": self.holds}


@dataclass(frozen=True, slots=True)
class Mean:
    """auto / plain, over some cells."""

    start: str
    over: str
    num_cells: int
    value: float  # geometric mean of the cells' medians
    rounds: Median | None  # of the geometric means of single rounds; None: no round has all these cells
    bar: float | None  # None: shown, not judged

    @property
    def holds(self) -> str | None:
        if self.bar is None:
            return None
        return HOLDS if self.value >= self.bar else FAILS

    def row(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "over": self.over,
            "cells": self.num_cells,
            "geometric mean": round(self.value, 3),
            "single rounds": None if self.rounds is None else f"{_text(self.rounds)} ({self.rounds.coverage:.0%})",
            "at least": self.bar,
            "holds": self.holds,
        }


def worst(found: Sequence[str] | set[str]) -> str:
    return next((verdict for verdict in (FAILS, OPEN) if verdict in found), HOLDS)


def verdicts(analysis: Analysis, num_rounds: int = 1, start: str = WARM) -> list[Verdict]:
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
            early = _early(auto, analysis.cells["plain", point])
            result.append(Verdict(point, start, num_rounds, auto.speedup, median(ratios), best.setting, early))
    return result


def _early(auto: CellResult, plain: CellResult) -> float | None:
    """Tokens of the first seconds, auto / plain: median over rounds in which both took that long."""
    tokens = {record["cell"]["repeat"]: record["summary"].get("tokens_by_second", []) for record in plain.records}
    found = []
    for record in auto.records:
        own, other = record["summary"].get("tokens_by_second", []), tokens.get(record["cell"]["repeat"], [])
        if min(len(own), len(other)) >= EARLY_S and other[EARLY_S - 1]:
            found.append(own[EARLY_S - 1] / other[EARLY_S - 1])
    return median(found).value if found else None


def means(analysis: Analysis, found: Sequence[Verdict], is_claimed_grid: bool) -> list[Mean]:
    """Over all cells, for each temperature, each number of users (judged), and each pair of them (shown)."""
    if not found:
        return []
    start = found[0].start
    all_bar = LEAST_WARM_MEAN if start == WARM and is_claimed_grid else None
    result = [_mean(analysis, found, "all cells", all_bar)]
    parts: list[tuple[float | None, Callable[[Point], str]]] = [
        (LEAST_MEAN, lambda point: f"T = {point.temperature:g}"),
        (LEAST_MEAN, lambda point: point.load_text),
        (None, lambda point: f"T = {point.temperature:g}, {point.load_text}"),
    ]
    for bar, name in parts:
        groups: dict[str, list[Verdict]] = {}
        for verdict in sorted(found, key=lambda v: (v.point.temperature, v.point.concurrency)):
            groups.setdefault(name(verdict.point), []).append(verdict)
        result += [_mean(analysis, group, over, bar) for over, group in groups.items()]
    return result


def _mean(analysis: Analysis, group: Sequence[Verdict], over: str, bar: float | None) -> Mean:
    by_round = []
    for number in range(group[0].num_rounds):
        found = [_speedup_in(analysis, verdict.point, number) for verdict in group]
        if None not in found:
            by_round.append(geometric_mean([speedup for speedup in found if speedup is not None]))
    value = geometric_mean([verdict.of_plain.value for verdict in group])
    return Mean(group[0].start, over, len(group), value, median(by_round) if by_round else None, bar)


def _speedup_in(analysis: Analysis, point: Point, number: int) -> float | None:
    """auto / plain in the round of this number."""
    of_round = {}
    for setting in (AUTO, "plain"):
        for record in analysis.cells[setting, point].records:
            if record["cell"]["repeat"] == number:
                of_round[setting] = record["summary"]["tokens_per_s"]
    return of_round[AUTO] / of_round["plain"] if len(of_round) == 2 else None


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def heat_map(found: list[Verdict]) -> HeatMap:
    """auto over plain: starts, workloads and temperatures down, concurrency across."""
    has_both = len({v.start for v in found}) > 1

    def row_of(v: Verdict) -> str:
        return f"{v.start + ' ' if has_both else ''}{v.point.workload}, T={v.point.temperature:g}"

    rows = sorted({row_of(v) for v in found})
    columns = sorted({v.point.concurrency for v in found})
    value = {(row_of(v), v.point.concurrency): v.of_plain.value for v in found}
    return HeatMap(
        "auto over plain decoding",
        "concurrency",
        "",
        [str(column) for column in columns],
        rows,
        [[value.get((row, column)) for column in columns] for row in rows],
    )


def _text(found: Median) -> str:
    return f"{found.low:.3f}..{found.high:.3f}"
