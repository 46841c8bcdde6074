"""One self-contained HTML page from a sweep's records: the pictures, the table, the recommendation, the provenance.

Pictures are inline SVG drawn by lab/svg.py; the page loads nothing and runs no script.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from paceline.bench.analyse.cells import PLAIN, Analysis, Point, analyse, by_category, table
from paceline.bench.analyse.recommend import recommend
from paceline.bench.run.results import Record
from paceline.lab.charts import BarChart, Chart, HeatMap, LineChart, Series, to_svg

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1360px;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ddd;padding:3px 8px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.charts{display:flex;flex-wrap:wrap;gap:1rem}"
    "figure{margin:0}pre{background:#f6f6f6;padding:1rem;overflow-x:auto}.bad{color:#b4232f}"
)


def report_html(records: Sequence[Record], title: str = "Paceline benchmark") -> str:
    analysis = analyse(records)
    advice = recommend(analysis)
    charts = [*speedup_over_k(analysis), *acceptance_by_position(analysis), *throughput(analysis)]
    charts += [*method_by_category(analysis), *win_maps(analysis)]
    pictures = "".join(f"<figure>{to_svg(chart)}</figure>" for chart in charts)
    config = {"speculative_config": advice["speculative_config"]}
    shown = f"<pre>{escape(json.dumps(config, indent=2))}</pre>" if advice["speculative_config"] else ""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<h2>Recommended</h2><p>{escape(advice['reason'])}</p>{shown}",
        _warnings(analysis),
        f"<h2>Pictures</h2><div class='charts'>{pictures}</div>",
        f"<h2>All cells</h2>{_html_table(table(analysis))}",
        f"<h2>Where this comes from</h2><pre>{escape(json.dumps(_provenance(records), indent=1))}</pre>",
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def speedup_over_k(analysis: Analysis) -> list[Chart]:
    """One chart per load: speedup over K for each method and workload, its sweet spot marked."""
    groups: dict[tuple[float, str], dict[str, list[tuple[int, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (_, point), cell in analysis.cells.items():
        factor, k = cell.speedup, cell.num_speculative_tokens
        if factor is not None and k is not None:
            name = f"{cell.method}, {point.workload}"
            spread = (factor.high - factor.low) / 2
            groups[point.temperature, point.load_name][name].append((k, factor.value, spread))
    charts: list[Chart] = []
    for (temperature, load), lines in sorted(groups.items()):
        if len({k for points in lines.values() for k, _, _ in points}) < 2:
            continue  # one K is no curve
        series, marks = [], []
        for name, points in lines.items():
            points.sort()
            series.append(Series(name, [k for k, _, _ in points], [y for _, y, _ in points], [e for _, _, e in points]))
            best = max(points, key=lambda p: p[1])
            marks.append((float(best[0]), best[1], f"K={best[0]}"))
        title = f"Speedup over K (T={temperature:g}, load {load})"
        charts.append(LineChart(title, "draft tokens K", "speedup", series, level=1.0, marks=marks))
    return charts


def acceptance_by_position(analysis: Analysis) -> list[Chart]:
    series = []
    for setting in analysis.settings:
        summed: list[float] = []
        weight = 0
        for (name, _), cell in analysis.cells.items():
            for record in cell.records:
                speculation = record["summary"].get("speculation")
                if name != setting or not speculation or not speculation["num_drafts"]:
                    continue
                weight += speculation["num_drafts"]
                rates = speculation["acceptance_by_position"]
                summed += [0.0] * (len(rates) - len(summed))
                for i, rate in enumerate(rates):
                    summed[i] += rate * speculation["num_drafts"]
        if summed:
            series.append(Series(setting, list(range(1, len(summed) + 1)), [value / weight for value in summed]))
    if not series:
        return []
    return [LineChart("Acceptance by position", "position in the draft", "accepted share of drafts", series)]


def throughput(analysis: Analysis) -> list[Chart]:
    """Per-user against total speed: each line goes through the loads."""
    charts: list[Chart] = []
    for workload, temperature in sorted({(p.workload, p.temperature) for p in analysis.points}):
        series = []
        for setting in analysis.settings:
            cells = [
                cell
                for (name, point), cell in analysis.cells.items()
                if name == setting and (point.workload, point.temperature) == (workload, temperature)
            ]
            cells.sort(key=lambda cell: cell.point)
            pairs = [(cell.tokens_per_s.value, cell.tokens_per_s_per_user) for cell in cells]
            if len(pairs) > 1:
                series.append(Series(setting, [x for x, _ in pairs], [y for _, y in pairs]))
        if series:
            title = f"Speed per user against total ({workload}, T={temperature:g})"
            charts.append(LineChart(title, "tokens/s in total", "tokens/s per user", series))
    return charts


def method_by_category(analysis: Analysis) -> list[Chart]:
    speedups = by_category(analysis)
    categories = sorted({category for values in speedups.values() for category in values})
    if not categories:
        return []
    bars = [(setting, [values.get(category) for category in categories]) for setting, values in speedups.items()]
    return [BarChart("Speedup per user by method and category", "speedup", categories, bars, level=1.0)]


def win_maps(analysis: Analysis) -> list[Chart]:
    """Concurrency against setting: where speculation wins (above 1) and where it loses."""
    charts: list[Chart] = []
    settings = [setting for setting in analysis.settings if setting != PLAIN]
    for workload, temperature in sorted({(p.workload, p.temperature) for p in analysis.points}):
        points = [p for p in analysis.points if (p.workload, p.temperature) == (workload, temperature)]
        values = [[_speedup(analysis, setting, point) for setting in settings] for point in points]
        if any(value is not None for row in values for value in row):
            title = f"Where it wins: {workload}, T={temperature:g}"
            rows = [point.load_name for point in points]
            charts.append(HeatMap(title, "setting", "concurrency", settings, rows, values))
    return charts


def _speedup(analysis: Analysis, setting: str, point: Point) -> float | None:
    cell = analysis.cells.get((setting, point))
    return None if cell is None or cell.speedup is None else cell.speedup.value


def _warnings(analysis: Analysis) -> str:
    lines = [f"{record['cell']['setting']}: {record.get('error')}" for record in analysis.failed]
    lines += [f"outputs differ from plain decoding: {name}" for name in analysis.different_outputs()]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2 class='bad'>Failed or doubtful ({len(lines)})</h2><p>Not part of any figure below.</p><ul>{items}</ul>"


def _html_table(rows: Sequence[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    header = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{header}</tr>{body}</table>"


def _provenance(records: Sequence[Record]) -> dict[str, Any]:
    facts = [record["provenance"] for record in records if "provenance" in record]
    first = facts[0] if facts else {}
    return {
        "runs": len(records),
        "commits": sorted({str(fact.get("commit")) for fact in facts}),
        "models": sorted({str(record.get("backend", {}).get("model")) for record in records}),
        "machine": first.get("machine"),
        "versions": first.get("versions"),
        "command": first.get("command"),
        "first": min((fact["time"] for fact in facts), default=None),
        "last": max((fact["time"] for fact in facts), default=None),
    }
