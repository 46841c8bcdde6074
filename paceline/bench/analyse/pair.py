"""A draft and a target model as a pair: the measured sweet spot beside the lab's prediction, and SpecInfer's studies.

The prediction takes from the run with the largest K what the drafter is like (the share of drafts accepted to each
position, the seconds per draft token), and from the pass cost curve what verifying costs. It then says the speedup of
every K, and the best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.analyse.cells import Analysis, CellResult, Point, analyse
from paceline.bench.run.pair_grid import CHAIN, FILED, MULTI_STEP, NAIVE, STOPS, WIDTH
from paceline.bench.run.results import Record
from paceline.lab.charts import Chart, LineChart, Series
from paceline.lab.pass_cost import PassCost
from paceline.lab.speedup import Speculation, speedup


@dataclass(frozen=True, slots=True)
class SweetSpot:
    """The best K at one workload and load; 0 where plain decoding is the fastest."""

    point: Point
    measured: dict[int, float]  # K -> speedup
    predicted: dict[int, float]

    @property
    def best_measured(self) -> int:
        return max({0: 1.0} | self.measured, key=lambda k: ({0: 1.0} | self.measured)[k])

    @property
    def best_predicted(self) -> int:
        return max({0: 1.0} | self.predicted, key=lambda k: ({0: 1.0} | self.predicted)[k])

    def row(self) -> dict[str, Any]:
        best = self.best_measured
        return {
            "workload": self.point.workload,
            "users": self.point.concurrency,
            "best K": best,
            "speedup": round(self.measured.get(best, 1.0), 3),
            "predicted there": round(self.predicted.get(best, 1.0), 3) if self.predicted else None,
            "K the model would take": self.best_predicted if self.predicted else None,
            "its measured speedup": round(self.measured.get(self.best_predicted, 1.0), 3) if self.predicted else None,
        }


def sweet_spots(analysis: Analysis, curve: PassCost | None) -> list[SweetSpot]:
    spots = []
    for point in analysis.points:
        chains = {
            cell.num_speculative_tokens: cell
            for cell in analysis.at(point)
            if cell.setting.startswith(CHAIN) and cell.speedup is not None
        }
        measured = {k: cell.speedup.value for k, cell in chains.items() if k is not None and cell.speedup is not None}
        if not measured:
            continue
        drafter = None if curve is None else _drafter(chains[max(measured)], point, curve)
        predicted = {} if drafter is None else {k: speedup(drafter, k) for k in sorted(measured)}
        spots.append(SweetSpot(point, dict(sorted(measured.items())), predicted))
    return spots


def _drafter(cell: CellResult, point: Point, curve: PassCost) -> Speculation | None:
    """What drafting is like, from the run with the most draft tokens; None where the backend does not say."""
    summary = cell.records[0]["summary"]
    drafts, engine = summary.get("speculation"), summary.get("engine") or {}
    if not drafts or not drafts["num_draft_tokens"] or not engine.get("num_passes"):
        return None
    reach = [min(1.0, share) for share in drafts["acceptance_by_position"]]
    before = [1.0, *reach[:-1]]
    rates = [min(1.0, share / earlier) if earlier else 0.0 for share, earlier in zip(reach, before, strict=True)]
    most = cell.num_speculative_tokens or 1
    rates += [0.0] * (most - len(rates))
    draft_s = engine.get("draft_s", 0.0) / engine["num_passes"] / most
    return Speculation(rates, draft_s, pass_cost=curve, batch=point.concurrency or 1)


def tokens_per_pass(analysis: Analysis, prefix: str) -> dict[str, dict[int, float]]:
    """workload -> width -> tokens that a pass of the target emits"""
    found: dict[str, dict[int, float]] = {}
    for (setting, point), cell in analysis.cells.items():
        length = cell.mean_of("speculation", "mean_acceptance_length")
        if setting.startswith(prefix) and length is not None:
            found.setdefault(point.workload, {})[int(setting.removeprefix(prefix))] = length
    return {workload: dict(sorted(widths.items())) for workload, widths in found.items()}


def width_rows(analysis: Analysis) -> list[dict[str, Any]]:
    greedy, multi, naive = (tokens_per_pass(analysis, prefix) for prefix in (WIDTH, MULTI_STEP, NAIVE))
    rows = []
    for workload in dict.fromkeys([*greedy, *multi, *naive]):
        widths = sorted({w for figures in (greedy, multi, naive) for w in figures.get(workload, {})})
        for width in widths:
            sides = [figures.get(workload, {}).get(width) for figures in (greedy, multi, naive)]
            gain = sides[1] - sides[2] if sides[1] is not None and sides[2] is not None else None
            rows.append(
                {
                    "workload": workload,
                    "width": width,
                    "tokens/pass, greedy": sides[0],
                    "T=1, multi-step": sides[1],
                    "T=1, naive": sides[2],
                    "multi-step gains": gain,
                }
            )
    return rows


def variant_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Every way to draft a chain, beside plain decoding: fixed K, chains that stop, and the file's own weights."""
    rows = []
    for point in analysis.points:
        for cell in analysis.at(point):
            if cell.setting.startswith((CHAIN, STOPS, FILED)):
                length = cell.mean_of("speculation", "mean_acceptance_length")
                rows.append(
                    {
                        "workload": point.workload,
                        "users": point.concurrency,
                        "drafts": cell.setting,
                        "tokens/pass": length,
                        "tok/s": round(cell.tokens_per_s.value, 1),
                        "speedup": None if cell.speedup is None else round(cell.speedup.value, 3),
                    }
                )
    return rows


def position_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """How often a draft was accepted to each position, with the largest K, by workload, at the least load."""
    rows: list[dict[str, Any]] = []
    for point in analysis.points:
        chains = [cell for cell in analysis.at(point) if cell.setting.startswith(CHAIN)]
        if chains and not any(row["workload"] == point.workload for row in rows):
            longest = max(chains, key=lambda cell: cell.num_speculative_tokens or 0)
            shares = longest.records[0]["summary"]["speculation"]["acceptance_by_position"]
            rows.append({"workload": point.workload} | {str(i): round(share, 3) for i, share in enumerate(shares, 1)})
    return rows


def category_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Tokens per pass of each K by category of prompt, over all loads, mean."""
    found: dict[str, dict[str, list[float]]] = {}
    for (setting, _), cell in analysis.cells.items():
        for category in cell.records[0]["summary"]["by_category"] if setting.startswith(CHAIN) else ():
            length = cell.mean_of("by_category", category, "mean_acceptance_length")
            if length is not None:
                found.setdefault(category, {}).setdefault(setting, []).append(length)
    return [
        {"tokens/pass": category} | {setting: sum(values) / len(values) for setting, values in settings.items()}
        for category, settings in sorted(found.items())
    ]


def pair_charts(records: Sequence[Record], curve: PassCost | None) -> list[Chart]:
    analysis = analyse(records)
    charts: list[Chart] = [_over_k(spot) for spot in sweet_spots(analysis, curve) if len(spot.measured) > 1]
    widths = [_over_width(analysis, f"{WIDTH}", "Tokens per pass over the tree's width (greedy)", "")]
    widths.append(_over_width(analysis, MULTI_STEP, "Multi-step against naive sampling (T=1)", "multi-step, ", NAIVE))
    return charts + [chart for chart in widths if chart.series]


def _over_k(spot: SweetSpot) -> LineChart:
    series = [Series("measured", list(spot.measured), list(spot.measured.values()))]
    if spot.predicted:
        series.append(Series("predicted", list(spot.predicted), list(spot.predicted.values()), dash=1))
    best = spot.best_measured
    marks = [(float(best), spot.measured[best], f"K={best}")] if best else []
    title = f"Speedup over K: {spot.point.workload}, {spot.point.load_text}"
    return LineChart(title, "draft tokens K", "speedup", series, level=1.0, marks=marks)


def _over_width(analysis: Analysis, prefix: str, title: str, name: str, other: str | None = None) -> LineChart:
    sides = [(name, tokens_per_pass(analysis, prefix), 0)]
    sides += [] if other is None else [("naive, ", tokens_per_pass(analysis, other), 1)]
    series = [
        Series(f"{label}{workload}", list(widths), list(widths.values()), dash=dash)
        for label, found, dash in sides
        for workload, widths in found.items()
    ]
    return LineChart(title, "children of the first token", "tokens per pass", series)
