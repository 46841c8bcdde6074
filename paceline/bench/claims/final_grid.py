"""The claim "never slower, cold and warm" on one commit: every cell of the grid, with rounds fixed beforehand.

Each cell is measured in as many rounds as every other. Its figure is the geometric mean of auto / plain over the
rounds, with a 95 % interval by Student's t on the logarithms. A cell fails where its whole interval lies below the bar;
and the geometric mean over the workloads must reach 1 for each temperature and number of users.

*Warm*: engines that answered other prompts before. *Cold*: fresh engines, counted from their first request on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.analyse.cells import PLAIN, Analysis, CellResult, Point
from paceline.bench.claims.never_slower import AUTO

LEAST_OF_PLAIN, LEAST_MEAN, LEAST_WARM_MEAN, LEAST_OF_BEST = 0.97, 1.0, 1.18, 0.95
ROUNDS, TOKENS = 3, 64
FIXED = ("suffix:4", "suffix:16")  # in the first round, warm, to know the best fixed setting
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 95 %


def requests_for(num_users: int) -> int:
    """About three seconds of each engine on two cores, whatever the number of users."""
    return max(8, min(6 * num_users, 48), 2 * num_users)


@dataclass(frozen=True, slots=True)
class Ratio:
    """auto over something, in one cell."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> "Ratio":
        logs = [math.log(ratio) for ratio in ratios]
        count, mean = len(logs), sum(logs) / len(logs)
        if count == 1:
            return Ratio(math.exp(mean), 0.0, math.inf)
        spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / (count - 1) / count)
        half = STUDENT.get(count - 1, 1.96) * spread
        return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass(frozen=True, slots=True)
class Verdict:
    state: str  # "warm" or "cold"
    point: Point
    of_plain: Ratio
    num_rounds: int
    best: str | None  # fixed setting, where any was measured beside it
    of_best: float | None

    @property
    def holds(self) -> bool:
        return self.of_plain.high >= LEAST_OF_PLAIN

    def row(self) -> dict[str, Any]:
        ratio = self.of_plain
        return {
            "state": self.state,
            "workload": self.point.workload,
            "T": self.point.temperature,
            "users": self.point.concurrency,
            "auto / plain": round(ratio.mean, 3),
            "95 % from": round(ratio.low, 3),
            "to": round(ratio.high, 3) if math.isfinite(ratio.high) else None,
            "rounds": self.num_rounds,
            "best fixed": self.best or "",
            "auto / best": round(self.of_best, 3) if self.of_best else None,
            "holds": "yes" if self.holds else "NO",
        }


def verdicts(state: str, analysis: Analysis) -> list[Verdict]:
    found = []
    for point in analysis.points:
        auto, plain = analysis.cells.get((AUTO, point)), analysis.cells.get((PLAIN, point))
        if auto is None or plain is None:
            continue
        ratios = auto.over(plain)
        others = [cell for cell in analysis.at(point) if cell.setting not in (AUTO, PLAIN)]
        best, of_best = _best([*others, plain], auto) if others else (None, None)
        found.append(Verdict(state, point, Ratio.of(ratios), len(ratios), best, of_best))
    return found


def _best(cells: Sequence[CellResult], auto: CellResult) -> tuple[str, float]:
    """The setting against which auto does worst, in the rounds that have both."""
    mean, name = min((Ratio.of(auto.over(cell)).mean, cell.setting) for cell in cells)
    return name, mean


def means(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Geometric means over workloads, by state, temperature and users; then over everything warm and cold."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for one in found:
        groups.setdefault((one.state, f"{one.point.temperature:g}", str(one.point.concurrency)), []).append(one)
        groups.setdefault((one.state, "all", "all"), []).append(one)
    rows = []
    for (state, temperature, users), cells in groups.items():
        least = LEAST_WARM_MEAN if (state, users) == ("warm", "all") else LEAST_MEAN
        mean = _geometric([one.of_plain.mean for one in cells])
        of_best = [one.of_best for one in cells if one.of_best]
        against = _geometric(of_best) if of_best else None
        holds = mean >= least and (users != "all" or against is None or against >= LEAST_OF_BEST)
        rows.append(
            {
                "state": state,
                "T": temperature,
                "users": users,
                "cells": len(cells),
                "auto / plain": round(mean, 3),
                "at least": least,
                "auto / best": None if against is None else round(against, 3),
                "holds": "yes" if holds else "NO",
            }
        )
    return rows


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
