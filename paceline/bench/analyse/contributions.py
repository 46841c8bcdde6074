"""What `paceline bench contributions` found: each combination of parts beside none and beside all of them."""

from typing import Any

from paceline.bench.analyse.cells import Analysis
from paceline.bench.analyse.intervals import median
from paceline.bench.run.contributions import ALL, NONE, combination_name, combinations


def contribution_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Ratios are medians over rounds, each within its round."""
    cells = {setting: cell for (setting, _), cell in analysis.cells.items()}
    rows = []
    for name, cell in cells.items():
        over_none, over_all = (median(cell.over(cells[base])).value for base in (NONE, ALL))
        first_s = cell.mean_of("ttft_s", "p50")
        rows.append(
            {
                "parts": name,
                "tok/s": round(cell.tokens_per_s.value, 1),
                "of none": f"{over_none:.2f}x",
                "of all": f"{over_all:.2f}x",
                "first token s": None if first_s is None else round(first_s, 2),
            }
        )
    order = [combination_name(parts) for parts in combinations()]
    return sorted(rows, key=lambda row: order.index(row["parts"]))
