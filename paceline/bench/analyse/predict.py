"""Does the lab's model explain the sweep? Predicted against measured speedup, cell by cell.

From a run come the measured acceptance (accepted tokens per pass) and the drafting time, from the plain run of the same
repeat what a step without drafts takes, and from `curve.py` what further rows cost on top of it. The model then says
how long the run should have taken:

    passes  = tokens / (expected tokens per request and pass x requests in the pass)
    step    = plain step + level x (T(requests + nodes) - T(requests)) + drafting
    seconds = plain run - plain passes x plain step + passes x step

Requests bring work whatever their rows: that is in the plain step and not in T. The level is how much slower the
machine was than when T was taken. It is estimated twice: from the plain run beside, whose steps are longer for the
requests' own work as well, and from the plain run with the fewest users, which has the least of that but was taken at
another time. The geometric mean of the two is used.
The plain run's time beyond its passes (reading prompts, filling and draining the batch) is taken over as it is. The
prediction of a cell is the median over its repeats, as the measurement is.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from paceline.bench.analyse.cells import PLAIN, Analysis, CellResult
from paceline.lab.charts import LineChart, Series
from paceline.lab.pass_cost import PassCost

TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Prediction:
    cell: CellResult
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    def row(self) -> dict[str, Any]:
        point = self.cell.point
        return {
            "workload": point.workload,
            "T": point.temperature,
            "load": point.load_name,
            "setting": self.cell.setting,
            "predicted": round(self.predicted, 3),
            "measured": round(self.measured, 3),
            "error": f"{self.error:+.1%}",
            "within": "yes" if abs(self.error) <= TOLERANCE else "NO",
        }


def predictions(analysis: Analysis, curves: dict[float, PassCost]) -> list[Prediction]:
    """Of all speculative cells of our engine. `curves`: temperature -> pass cost; 0.0 stands in for others."""
    result = []
    levels = _levels(analysis, curves)
    for (setting, point), cell in analysis.cells.items():
        plain = analysis.cells.get((PLAIN, point))
        if setting == PLAIN or plain is None or cell.speedup is None:
            continue
        base = {record["cell"]["repeat"]: record["summary"] for record in plain.records}
        predicted = []
        for record in cell.records:
            repeat = record["cell"]["repeat"]
            if repeat in base:
                level = levels.get((point.workload, point.temperature, repeat), 1.0)
                found = _predict(record["summary"], base[repeat], _curve(curves, point.temperature), level)
                predicted += [] if found is None else [found]
        if predicted:
            result.append(Prediction(cell, statistics.median(predicted), cell.speedup.value))
    return result


def _curve(curves: dict[float, PassCost], temperature: float) -> PassCost:
    return curves.get(temperature) or curves[min(curves)]


def _levels(analysis: Analysis, curves: dict[float, PassCost]) -> dict[tuple[str, float, int], float]:
    """(workload, temperature, repeat) -> how much slower a step was there than when the curve was taken."""
    levels: dict[tuple[str, float, int], float] = {}
    plain = [cell for (setting, _), cell in analysis.cells.items() if setting == PLAIN and cell.point.concurrency]
    for cell in sorted(plain, key=lambda cell: cell.point.concurrency):
        for record in cell.records:
            step_s = _plain_step_s(record["summary"])
            where = (cell.point.workload, cell.point.temperature, record["cell"]["repeat"])
            if step_s:
                curve = _curve(curves, cell.point.temperature)
                levels.setdefault(where, step_s / curve(cell.point.concurrency))
    return levels


def _plain_step_s(plain: dict[str, Any]) -> float | None:
    """Of the full batch: most tokens come after such a step."""
    step_s = (plain.get("inter_token_s") or {}).get("p50")
    return float(step_s) if step_s else None


def _predict(own: dict[str, Any], plain: dict[str, Any], curve: PassCost, level: float) -> float | None:
    """The speedup of a run, from its summary and that of the plain run beside it; None: a server that does not say.

    `level`: the machine's, by the plain run with the fewest users."""
    drafts, plain_drafts, engine = own.get("speculation"), plain.get("speculation"), own.get("engine")
    if not drafts or not plain_drafts or not engine or "num_passes" not in engine:
        return None
    passes, plain_passes = engine["num_passes"], plain["engine"]["num_passes"]
    batch, plain_batch = drafts["num_steps"] / passes, plain_drafts["num_steps"] / plain_passes
    expected_passes = plain["num_output_tokens"] / (drafts["mean_acceptance_length"] * batch)
    plain_step_s = _plain_step_s(plain) or level * curve(plain_batch)
    level = math.sqrt(level * plain_step_s / curve(plain_batch))
    rows = batch + drafts["num_draft_tokens"] / passes
    step_s = plain_step_s + level * (curve(rows) - curve(plain_batch)) + engine["draft_s"] / passes
    wall_s = plain["wall_s"] - plain_passes * plain_step_s + expected_passes * step_s
    return float(plain["wall_s"] / wall_s)


def chart(found: list[Prediction]) -> LineChart:
    """Predicted over measured, one series per setting; perfect predictions lie on the dashed line."""
    settings = list(dict.fromkeys(p.cell.setting for p in found))
    series = []
    for setting in settings:
        own = [p for p in found if p.cell.setting == setting]
        series.append(Series(setting, [p.measured for p in own], [p.predicted for p in own], points_only=True))
    return LineChart("Speedup: the lab's model against the measurement", "measured", "predicted", series, diagonal=True)
