"""Does the lab's model explain the sweep? Predicted against measured speedup, cell by cell.

From a run come the measured acceptance (accepted tokens per pass) and the drafting time, from the plain run of the same
repeat the level of the machine's speed, and from `curve.py` the shape: what a pass of n rows costs against one of B.
The model then says how long the run should have taken:

    passes  = tokens / (expected tokens per request and pass x requests in the pass)
    seconds = plain run - plain passes x T(requests) + passes x (T(requests + nodes) + drafting)

The plain run's time beyond its passes (reading prompts, filling and draining the batch) is taken over as it is. The
prediction of a cell is the median over its repeats, as the measurement is.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from paceline.bench.analysis import PLAIN, Analysis, CellResult
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
    for (setting, point), cell in analysis.cells.items():
        plain = analysis.cells.get((PLAIN, point))
        if setting == PLAIN or plain is None or cell.speedup is None:
            continue
        curve = curves.get(point.temperature) or curves[min(curves)]
        base = {record["cell"]["repeat"]: record["summary"] for record in plain.records}
        pairs = [(record["summary"], base.get(record["cell"]["repeat"])) for record in cell.records]
        found = [_predict(own, alone, curve, point.concurrency) for own, alone in pairs if alone is not None]
        predicted = [value for value in found if value is not None]
        if predicted:
            result.append(Prediction(cell, statistics.median(predicted), cell.speedup.value))
    return result


def _predict(own: dict[str, Any], plain: dict[str, Any], curve: PassCost, concurrency: int) -> float | None:
    """The speedup of a run, from its summary and that of the plain run beside it; None: a server that does not say."""
    spoken, plain_spoken, engine = own.get("speculation"), plain.get("speculation"), own.get("engine")
    if not spoken or not plain_spoken or not engine or "num_passes" not in engine:
        return None
    level = _level(plain, curve, concurrency)
    passes, plain_passes = engine["num_passes"], plain["engine"]["num_passes"]
    batch, plain_batch = spoken["num_steps"] / passes, plain_spoken["num_steps"] / plain_passes
    expected_passes = plain["num_output_tokens"] / (spoken["mean_acceptance_length"] * batch)
    pass_s = level * curve(batch + spoken["num_draft_tokens"] / passes) + engine["draft_s"] / passes
    wall_s = plain["wall_s"] - plain_passes * level * curve(plain_batch) + expected_passes * pass_s
    return float(plain["wall_s"] / wall_s)


def _level(plain: dict[str, Any], curve: PassCost, concurrency: int) -> float:
    """How much slower the machine was than when the curve was taken: a step of the full batch, then and now."""
    step_s = (plain.get("inter_token_s") or {}).get("p50")
    return step_s / curve(concurrency) if step_s and concurrency else 1.0


def chart(found: list[Prediction]) -> LineChart:
    """Predicted over measured, one series per setting; perfect predictions lie on the dashed line."""
    settings = list(dict.fromkeys(p.cell.setting for p in found))
    series = []
    for setting in settings:
        own = [p for p in found if p.cell.setting == setting]
        series.append(Series(setting, [p.measured for p in own], [p.predicted for p in own], points_only=True))
    return LineChart("Speedup: the lab's model against the measurement", "measured", "predicted", series, diagonal=True)
