"""From a sweep to a configuration: what `paceline serve --config` should be started with.

Among the settings measured, the one with the best geometric mean of speedups over all points wins, unless one of its
cells is clearly slower than plain; a setting that loses somewhere is recommended only up to the load where it wins.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.analyse.cells import PLAIN, Analysis, CellResult
from paceline.bench.run.results import Record

LOSS = 0.97  # a cell below this share of plain counts as a loss


def recommend(analysis: Analysis) -> dict[str, Any]:
    """{"speculative_config": ..., "reason": ..., ...}, ready for JSON; the configuration of a server is not known."""
    judged = [_judge(analysis, setting) for setting in analysis.settings if setting != PLAIN]
    known = [entry for entry in judged if entry is not None]
    safe = [entry for entry in known if not entry["losses"]]
    gains = [entry for entry in safe if entry["mean_speedup"] > 1.0]
    if not gains:
        return {
            "speculative_config": {"method": "none"},
            "reason": "no setting was faster than plain decoding without losing somewhere: leave speculation off",
            "judged": known,
        }
    best = max(gains, key=lambda entry: entry["mean_speedup"])
    return {
        "speculative_config": best["speculative_config"],
        "reason": (
            f"{best['setting']} has the best mean speedup, {best['mean_speedup']:.2f}x over {best['num_points']} "
            f"points, and is nowhere slower than {LOSS}x plain"
            + (
                ""
                if best["speculative_config"]
                else "; that server's own options are not known here: start it as it was"
            )
        ),
        "judged": known,
    }


def serve_options(records: Sequence[Record], advice: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of `paceline serve` for what was measured: the advice, and the model where it was only one.

    None where a server won whose configuration is not known: without the key, the options would mean `auto`.
    """
    if advice["speculative_config"] is None:
        return None
    models = {record.get("backend", {}).get("model") for record in records} - {None}
    options: dict[str, Any] = {"model": models.pop()} if len(models) == 1 else {}
    return options | {"speculative_config": advice["speculative_config"]}


def _judge(analysis: Analysis, setting: str) -> dict[str, Any] | None:
    cells: list[CellResult] = [cell for (name, _), cell in analysis.cells.items() if name == setting]
    speedups = {cell.point: cell.speedup.value for cell in cells if cell.speedup is not None}
    if not speedups:
        return None
    return {
        "setting": setting,
        "speculative_config": cells[0].records[0]["cell"]["speculative_config"],
        "mean_speedup": math.exp(sum(math.log(value) for value in speedups.values()) / len(speedups)),
        "worst_speedup": min(speedups.values()),
        "num_points": len(speedups),
        "losses": [
            f"{point.workload}, T={point.temperature:g}, load {point.load_name}: {value:.2f}x"
            for point, value in sorted(speedups.items())
            if value < LOSS
        ],
    }
