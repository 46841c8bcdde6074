"""The pictures of a report, as data. A setting has one colour in all of them.

Settings of one method are shades of one colour, the strongest for the largest K, so that a line through the settings of
a method can have the method's colour. Plain decoding is grey.
"""

from collections import defaultdict
from dataclasses import dataclass

from paceline.bench.analyse.cells import PLAIN, Analysis, CellResult, Point, by_category
from paceline.lab.charts import BarChart, Chart, HeatMap, LineChart, Series

PLAIN_COLOUR = "#555555"
METHOD_COLOURS = ("#1f6fb4", "#d1570e", "#2a8f3c", "#8a4fb0", "#b4232f", "#7a6a1f", "#3a9aa0", "#c05a9a")
PALEST = 0.5  # share of white in the weakest shade: more of it cannot be seen on white


@dataclass(frozen=True, slots=True)
class Colours:
    of_setting: dict[str, str]
    of_method: dict[str, str]


def colours_of(analysis: Analysis) -> Colours:
    methods: dict[str, list[CellResult]] = defaultdict(list)
    for setting in analysis.settings:
        if setting != PLAIN:
            cell = next(cell for (name, _), cell in analysis.cells.items() if name == setting)
            methods[cell.method].append(cell)
    of_setting, of_method = {PLAIN: PLAIN_COLOUR}, {}
    for number, (method, cells) in enumerate(methods.items()):
        of_method[method] = METHOD_COLOURS[number % len(METHOD_COLOURS)]
        cells.sort(key=lambda cell: -(cell.num_speculative_tokens or 0))
        for place, cell in enumerate(cells):
            of_setting[cell.setting] = _paler(of_method[method], PALEST * place / max(1, len(cells) - 1))
    return Colours(of_setting, of_method)


def _paler(colour: str, white: float) -> str:
    channels = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)


def pictures(analysis: Analysis) -> list[Chart]:
    colours = colours_of(analysis)
    charts = [*speedup_over_k(analysis, colours), *acceptance_by_position(analysis, colours)]
    charts += [*throughput(analysis, colours), *method_by_category(analysis, colours)]
    return [*charts, *win_maps(analysis, colours)]


def speedup_over_k(analysis: Analysis, colours: Colours) -> list[Chart]:
    """One chart per load and temperature: speedup over K, a line for each method and workload, its best K marked."""
    loads = sorted({(p.temperature, p.concurrency, p.rate_per_s, p.load_text) for p in analysis.points})
    charts: list[Chart] = []
    for temperature, users, rate, text in loads:
        lines: dict[tuple[str, str], list[CellResult]] = defaultdict(list)
        for (_, point), cell in analysis.cells.items():
            here = (point.temperature, point.concurrency, point.rate_per_s) == (temperature, users, rate)
            if here and cell.speedup is not None and cell.num_speculative_tokens is not None:
                lines[cell.method, point.workload].append(cell)
        if len({cell.num_speculative_tokens for cells in lines.values() for cell in cells}) > 1:  # one K is no curve
            title = f"Speedup over K (T={temperature:g}, {text})"
            charts.append(_over_k(title, lines, colours))
    return charts


def _over_k(title: str, lines: dict[tuple[str, str], list[CellResult]], colours: Colours) -> LineChart:
    workloads = list(dict.fromkeys(workload for _, workload in lines))
    series, marks, of_line = [], [], {}
    for (method, workload), cells in lines.items():
        cells.sort(key=lambda cell: cell.num_speculative_tokens or 0)
        points = [(float(cell.num_speculative_tokens or 0), cell.speedup) for cell in cells if cell.speedup is not None]
        name = f"{method}, {workload}"
        of_line[name] = colours.of_method[method]
        series.append(
            Series(
                name,
                [k for k, _ in points],
                [speedup.value for _, speedup in points],
                [(speedup.high - speedup.low) / 2 for _, speedup in points],
                titles=[
                    f"{_named(cell)}: {speedup.value:.2f}x" for cell, (_, speedup) in zip(cells, points, strict=True)
                ],
                point_colours=[colours.of_setting[cell.setting] for cell in cells],
                dash=workloads.index(workload),
            )
        )
        k, best = max(points, key=lambda point: point[1].value)
        marks.append((k, best.value, f"K={k:g}"))
    return LineChart(title, "draft tokens K", "speedup", series, level=1.0, marks=marks, colours=of_line)


def _named(cell: CellResult) -> str:
    return f"{cell.setting}, {cell.point.workload}, {cell.point.load_text}"


def acceptance_by_position(analysis: Analysis, colours: Colours) -> list[Chart]:
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
    title, share = "Acceptance by position", "accepted share of drafts"
    return [LineChart(title, "position in the draft", share, series, colours=colours.of_setting)]


def throughput(analysis: Analysis, colours: Colours) -> list[Chart]:
    """Per-user against total speed: each line goes through the loads, which are written at the points."""
    charts: list[Chart] = []
    for workload, temperature in _conditions(analysis):
        series = []
        for setting in analysis.settings:
            cells = [
                cell
                for (name, point), cell in analysis.cells.items()
                if name == setting and (point.workload, point.temperature) == (workload, temperature)
            ]
            cells.sort(key=lambda cell: cell.point)
            if len(cells) > 1:
                series.append(_through_loads(setting, cells))
        if series:
            title = f"Speed per user against total ({workload}, T={temperature:g}; at each point: the number of users)"
            x_label, y_label = "tokens/s in total", "tokens/s per user"
            charts.append(LineChart(title, x_label, y_label, series, colours=colours.of_setting))
    return charts


def _through_loads(setting: str, cells: list[CellResult]) -> Series:
    pairs = [(cell.tokens_per_s.value, cell.tokens_per_s_per_user) for cell in cells]
    return Series(
        setting,
        [total for total, _ in pairs],
        [per_user for _, per_user in pairs],
        labels=[cell.point.load_name for cell in cells],
        titles=[
            f"{setting}, {cell.point.load_text}: {total:.1f} tokens/s in total, {per_user:.1f} per user"
            for cell, (total, per_user) in zip(cells, pairs, strict=True)
        ],
    )


def method_by_category(analysis: Analysis, colours: Colours) -> list[Chart]:
    speedups = by_category(analysis)
    categories = sorted({category for values in speedups.values() for category in values})
    if not categories:
        return []
    bars = [(setting, [values.get(category) for category in categories]) for setting, values in speedups.items()]
    title = "Speedup per user by method and category"
    return [BarChart(title, "speedup", categories, bars, level=1.0, colours=colours.of_setting)]


def win_maps(analysis: Analysis, colours: Colours) -> list[Chart]:
    """Load against setting: where speculation wins (above 1) and where it loses."""
    charts: list[Chart] = []
    settings = [setting for setting in analysis.settings if setting != PLAIN]
    for workload, temperature in _conditions(analysis):
        points = [p for p in analysis.points if (p.workload, p.temperature) == (workload, temperature)]
        values = [[_speedup(analysis, setting, point) for setting in settings] for point in points]
        if any(value is not None for row in values for value in row):
            title = f"Where it wins: {workload}, T={temperature:g}"
            rows = [point.load_text for point in points]
            charts.append(HeatMap(title, "setting", "", settings, rows, values, column_colours=colours.of_setting))
    return charts


def _conditions(analysis: Analysis) -> list[tuple[str, float]]:
    return sorted({(point.workload, point.temperature) for point in analysis.points})


def _speedup(analysis: Analysis, setting: str, point: Point) -> float | None:
    cell = analysis.cells.get((setting, point))
    return None if cell is None or cell.speedup is None else cell.speedup.value
