"""Does the lab's model know a speedup before it is measured? Predicted and explained against measured, cell by cell.

The model says how long a run with drafts takes, from what its drafter does in a step (`Drafting`), from the plain run
of the same repeat, and from what further rows cost (`bench curve`):

    passes  = tokens / (tokens per request and pass x requests in the pass)
    step    = plain step + level x (T(requests + nodes) - T(requests)) + drafting
    seconds = plain run - plain passes x plain step + passes x step

It is asked twice. It *predicts* a cell with what the drafter did in other cells: with the same prompts and temperature
and other numbers of users. Nothing that was measured of the setting in the cell itself is used, in any repeat. It
*explains* a cell with what the drafter did in that very run: then only the time is computed, and what is tested is
whether tokens, nodes and drafting time are all that counts.

Requests bring work whatever their rows: that is in the plain step and not in T. The level is how much slower the
machine was than when T was taken. It is estimated twice: from the plain run beside, whose steps are longer for the
requests' own work as well, and from the plain run with the fewest users, which has the least of that but was taken at
another time. The geometric mean of the two is used. The plain run's time beyond its passes (reading prompts, filling
and draining the batch) is taken over as it is. The figure of a cell is the median over its repeats, as the measurement
is.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.analyse.cells import PLAIN, Analysis, CellResult, Point
from paceline.lab.charts import LineChart, Series
from paceline.lab.pass_cost import PassCost

TOLERANCE = 0.10
Levels = dict[tuple[str, float, int], float]  # workload, temperature, repeat -> seconds there / seconds of the curve
Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter does in a step of the batch."""

    tokens: float  # per request: accepted ones, and the target's own
    nodes: float  # offered, per request
    draft_s: float  # for the whole batch
    requests: float | None = None  # in a pass; None: as many as without drafts


@dataclass(frozen=True, slots=True)
class Prediction:
    cell: CellResult
    measured: float
    explained: float  # with what the drafter did in this cell
    predicted: float | None  # with what it did in others; None: there are none

    def row(self) -> dict[str, Any]:
        point = self.cell.point
        row: dict[str, Any] = {
            "workload": point.workload,
            "T": point.temperature,
            "load": point.load_name,
            "setting": self.cell.setting,
            "measured": round(self.measured, 3),
        }
        for name, value in (("predicts", self.predicted), ("explains", self.explained)):
            error = None if value is None else value / self.measured - 1.0
            row[name] = None if value is None else round(value, 3)
            row[f"{name}: error"] = None if error is None else f"{error:+.1%}"
            row[f"{name}: within"] = None if error is None else "yes" if abs(error) <= TOLERANCE else "NO"
        return row


def predictions(analysis: Analysis, curves: dict[float, PassCost]) -> list[Prediction]:
    """Of all speculative cells of our engine. `curves`: temperature -> pass cost; 0.0 stands in for others."""
    result = []
    levels = _levels(analysis, curves)
    for (setting, point), cell in analysis.cells.items():
        plain = analysis.cells.get((PLAIN, point))
        if setting == PLAIN or plain is None or cell.speedup is None:
            continue
        curve = _curve(curves, point.temperature)
        own = {record["cell"]["repeat"]: _drafting_in(record["summary"]) for record in cell.records}
        elsewhere = _drafting_elsewhere(analysis, setting, point, levels)
        explained, predicted = [], []
        for record in plain.records:
            repeat = record["cell"]["repeat"]
            if repeat not in own or not _says_enough(record["summary"]):
                continue
            level = _level_at(levels, point, repeat)
            here = own[repeat]
            if here is not None:
                explained.append(_speedup(here, 1.0, record["summary"], curve, level))
            if elsewhere is not None:
                predicted.append(_speedup(elsewhere, level, record["summary"], curve, level))
        if explained:
            known = statistics.median(predicted) if predicted else None
            result.append(Prediction(cell, cell.speedup.value, statistics.median(explained), known))
    return result


def share_within(values: Sequence[tuple[float, float]]) -> float | None:
    """(said, measured): the share that is right within TOLERANCE; None without any."""
    right = [abs(said / measured - 1.0) <= TOLERANCE for said, measured in values]
    return sum(right) / len(right) if right else None


def error_table(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One row for each setting and one for all: how far off the model is with what it was fitted to, and without."""
    settings = list(dict.fromkeys(one.cell.setting for one in found))
    groups = [("all", list(found)), *((name, [p for p in found if p.cell.setting == name]) for name in settings)]
    rows = []
    for name, group in groups:
        row: dict[str, Any] = {"setting": name, "cells": len(group)}
        for what, values in (("predicts", predicted_of(group)), ("explains", explained_of(group))):
            errors = [abs(said / measured - 1.0) for said, measured in values]
            row[f"{what}: cells"] = len(errors)
            row[f"{what}: median error"] = f"{statistics.median(errors):.1%}" if errors else None
            row[f"{what}: worst"] = f"{max(errors):.1%}" if errors else None
            share = share_within(values)
            row[f"{what}: within {TOLERANCE:.0%}"] = None if share is None else f"{share:.0%}"
        rows.append(row)
    return rows


def predicted_of(found: Sequence[Prediction]) -> list[tuple[float, float]]:
    return [(one.predicted, one.measured) for one in found if one.predicted is not None]


def explained_of(found: Sequence[Prediction]) -> list[tuple[float, float]]:
    return [(one.explained, one.measured) for one in found]


def _curve(curves: dict[float, PassCost], temperature: float) -> PassCost:
    return curves.get(temperature) or curves[min(curves)]


def _levels(analysis: Analysis, curves: dict[float, PassCost]) -> Levels:
    """How much slower a step was there than when the curve was taken, by the plain run with the fewest users."""
    levels: Levels = {}
    plain = [cell for (setting, _), cell in analysis.cells.items() if setting == PLAIN and cell.point.concurrency]
    for cell in sorted(plain, key=lambda cell: cell.point.concurrency):
        for record in cell.records:
            step_s = _plain_step_s(record["summary"])
            where = (cell.point.workload, cell.point.temperature, record["cell"]["repeat"])
            if step_s:
                curve = _curve(curves, cell.point.temperature)
                levels.setdefault(where, step_s / curve(cell.point.concurrency))
    return levels


def _level_at(levels: Levels, point: Point, repeat: int) -> float:
    return levels.get((point.workload, point.temperature, repeat), 1.0)


def _plain_step_s(plain: Summary) -> float | None:
    """Of the full batch: most tokens come after such a step."""
    step_s = (plain.get("inter_token_s") or {}).get("p50")
    return float(step_s) if step_s else None


def _says_enough(summary: Summary) -> bool:
    """Our engine does; a server's own counts have no passes."""
    return bool(summary.get("speculation")) and "num_passes" in (summary.get("engine") or {})


def _drafting_in(summary: Summary) -> Drafting | None:
    if not _says_enough(summary):
        return None
    drafts, engine = summary["speculation"], summary["engine"]
    nodes = drafts["num_draft_tokens"] / drafts["num_steps"]
    num_steps, num_passes = drafts["num_steps"], engine["num_passes"]
    return Drafting(drafts["mean_acceptance_length"], nodes, engine["draft_s"] / num_passes, num_steps / num_passes)


def _drafting_elsewhere(analysis: Analysis, setting: str, point: Point, levels: Levels) -> Drafting | None:
    """What the drafter should do at a point, from what it did with other numbers of users. Its seconds: on a machine
    as fast as the curve's.

    Between two numbers of users tokens and nodes change with their logarithm, seconds with the number itself. Beyond
    the last one tokens and nodes stay as they were, and seconds continue their line."""
    by_users: dict[int, Drafting] = {}
    for (name, where), cell in analysis.cells.items():
        is_alike = (name, where.workload, where.temperature) == (setting, point.workload, point.temperature)
        if not is_alike or where.concurrency in (0, point.concurrency):
            continue
        found = [
            (drafting, _level_at(levels, where, record["cell"]["repeat"]))
            for record in cell.records
            if (drafting := _drafting_in(record["summary"])) is not None
        ]
        if found:
            by_users[where.concurrency] = Drafting(
                statistics.mean(drafting.tokens for drafting, _ in found),
                statistics.mean(drafting.nodes for drafting, _ in found),
                statistics.mean(drafting.draft_s / level for drafting, level in found),
            )
    if not by_users or not point.concurrency:
        return None
    users = sorted(by_users)
    logs, at = np.log2(users), math.log2(point.concurrency)
    return Drafting(
        float(np.interp(at, logs, [by_users[count].tokens for count in users])),
        float(np.interp(at, logs, [by_users[count].nodes for count in users])),
        _on_a_line(point.concurrency, users, [by_users[count].draft_s for count in users]),
    )


def _on_a_line(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Through the two neighbours, or the two that are nearest to an end; never below zero."""
    if len(xs) == 1:
        return ys[0]
    right = min(max(int(np.searchsorted(xs, at)), 1), len(xs) - 1)
    slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
    return max(0.0, ys[right - 1] + slope * (at - xs[right - 1]))


def _speedup(drafting: Drafting, draft_level: float, plain: Summary, curve: PassCost, level: float) -> float:
    """Of a run with drafts, from the plain run beside it. `level`: the machine's, by the plain run with the fewest
    users; `draft_level`: the machine's, where the drafter's seconds are those of the curve's machine."""
    plain_passes = plain["engine"]["num_passes"]
    plain_batch = plain["speculation"]["num_steps"] / plain_passes
    batch = drafting.requests or plain_batch
    passes = plain["num_output_tokens"] / (drafting.tokens * batch)
    plain_step_s = _plain_step_s(plain) or level * curve(plain_batch)
    level = math.sqrt(level * plain_step_s / curve(plain_batch))
    further_rows_s = level * (curve(batch * (1.0 + drafting.nodes)) - curve(plain_batch))
    step_s = plain_step_s + further_rows_s + draft_level * drafting.draft_s
    return float(plain["wall_s"] / (plain["wall_s"] - plain_passes * plain_step_s + passes * step_s))


def chart(found: list[Prediction]) -> LineChart:
    """Predicted over measured, one series per setting; perfect predictions lie on the dashed line. Where nothing could
    be predicted: explained over measured."""
    says, values_of = ("predicted", predicted_of) if predicted_of(found) else ("explained", explained_of)
    series = []
    for setting in dict.fromkeys(p.cell.setting for p in found):
        values = values_of([p for p in found if p.cell.setting == setting])
        if values:
            series.append(
                Series(setting, [measured for _, measured in values], [said for said, _ in values], points_only=True)
            )
    return LineChart(f"Speedup, {says} by the lab's model, against the measurement", "measured", says, series,
                     diagonal=True)  # fmt: skip
