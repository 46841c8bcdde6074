"""Does the lab's model explain the sweep? Predicted against measured speedup, cell by cell.

From a cell come the measured acceptance (accepted tokens per pass) and the drafting time; from `curve.py` the cost of a
pass by rows. The model then says how long the cell's run should have taken:

    passes  = tokens / (expected tokens per request and pass x requests in the pass)
    seconds = plain run - plain passes x T(requests) + passes x (T(requests + nodes) + drafting)

The plain run's time beyond its passes (reading prompts, filling and draining the batch) is taken over as it is.
"""

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
        predicted = _predict(cell, plain, curve)
        if predicted is not None:
            result.append(Prediction(cell, predicted, cell.speedup.value))
    return result


def _predict(cell: CellResult, plain: CellResult, curve: PassCost) -> float | None:
    plain_wall_s, plain_passes = plain.mean_of("wall_s"), plain.mean_of("engine", "num_passes")
    tokens, plain_steps = plain.mean_of("num_output_tokens"), plain.mean_of("speculation", "num_steps")
    per_pass = cell.mean_of("speculation", "mean_acceptance_length")
    steps, drafted = cell.mean_of("speculation", "num_steps"), cell.mean_of("speculation", "num_draft_tokens")
    passes, draft_s = cell.mean_of("engine", "num_passes"), cell.mean_of("engine", "draft_s")
    if None in (plain_wall_s, plain_passes, tokens, plain_steps, per_pass, steps, drafted, passes, draft_s):
        return None  # a server that does not say
    assert plain_wall_s and plain_passes and tokens and plain_steps and per_pass and steps and passes
    assert drafted is not None and draft_s is not None
    plain_batch, batch = plain_steps / plain_passes, steps / passes
    expected_passes = tokens / (per_pass * batch)
    pass_s = curve(batch + drafted / passes) + draft_s / passes
    wall_s = plain_wall_s - plain_passes * curve(plain_batch) + expected_passes * pass_s
    return plain_wall_s / wall_s


def chart(found: list[Prediction]) -> LineChart:
    """Predicted over measured, one series per setting; perfect predictions lie on the dashed line."""
    settings = list(dict.fromkeys(p.cell.setting for p in found))
    series = []
    for setting in settings:
        own = [p for p in found if p.cell.setting == setting]
        series.append(Series(setting, [p.measured for p in own], [p.predicted for p in own], points_only=True))
    return LineChart("Speedup: the lab's model against the measurement", "measured", "predicted", series, diagonal=True)
