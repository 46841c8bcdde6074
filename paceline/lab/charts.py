"""Charts as data: lines, bars and heat maps, drawn as SVG by our own code or as PNG by matplotlib.

A chart says what is shown; `svg.py` says how. The same chart goes into a file (`save`) or into a report's page.

>>> chart = LineChart("Tokens per step", "K", "tokens", [Series("g = 0.8", [1, 2, 3], [1.8, 2.44, 2.95])])
>>> save(chart, "tokens.svg")                                                      # doctest: +SKIP
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.lab import svg


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] | None = None  # half widths of the intervals around y
    points_only: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    level: float | None = None  # a dashed horizontal line: break-even
    diagonal: bool = False  # a dashed y = x line: predicted against measured
    log_x: bool = False
    marks: Sequence[tuple[float, float, str]] = field(default=())  # (x, y, label): a ring around a point


@dataclass(frozen=True, slots=True)
class BarChart:
    title: str
    y_label: str
    groups: Sequence[str]  # along the x axis
    series: Sequence[tuple[str, Sequence[float | None]]]  # name, one value per group; None: not measured
    level: float | None = None


@dataclass(frozen=True, slots=True)
class HeatMap:
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]  # [row][column]; None: not measured
    middle: float = 1.0  # neither won nor lost: the colours part here
    number_format: str = "{:.2f}"


Chart = LineChart | BarChart | HeatMap


def to_svg(chart: Chart, width: int = 640, height: int = 380) -> str:
    if isinstance(chart, LineChart):
        return svg.line_chart(chart, width, height)
    if isinstance(chart, BarChart):
        return svg.bar_chart(chart, width, height)
    return svg.heat_map(chart, width)


def save(chart: Chart, path: str | Path) -> None:
    """Write the chart; the file's ending chooses the format (.svg, or .png with the `plot` extra)."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind == ".svg":
        path.write_text(to_svg(chart), encoding="utf-8")
    elif kind == ".png":
        _save_png(chart, path)
    else:
        raise InvalidOptionError(f"a plot is a .svg or .png file, got {str(path)!r}")


def _save_png(chart: Chart, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidOptionError(
            "PNG plots need matplotlib: install paceline[plot], or give a file that ends in .svg"
        ) from error
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if isinstance(chart, HeatMap):
        _matplotlib_heat_map(chart, figure, axes)
    elif isinstance(chart, BarChart):
        _matplotlib_bars(chart, axes)
    else:
        _matplotlib_lines(chart, axes)
    axes.set_title(chart.title)
    figure.savefig(path, dpi=120)


def _matplotlib_lines(chart: LineChart, axes: Any) -> None:
    for series in chart.series:
        style = {"linestyle": "none"} if series.points_only else {}
        axes.errorbar(series.x, series.y, yerr=series.errors, marker="o", markersize=3, label=series.name, **style)
    if chart.diagonal:
        low = min(min(s.x) for s in chart.series)
        high = max(max(s.x) for s in chart.series)
        axes.plot([low, high], [low, high], "--", color="gray")
    if chart.level is not None:
        axes.axhline(chart.level, linestyle="--", color="gray")
    for x, y, label in chart.marks:
        axes.annotate(label, (x, y), textcoords="offset points", xytext=(4, 6))
    if chart.log_x:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.legend()


def _matplotlib_bars(chart: BarChart, axes: Any) -> None:
    width = 0.8 / max(1, len(chart.series))
    for i, (name, values) in enumerate(chart.series):
        places = [group + (i - (len(chart.series) - 1) / 2) * width for group in range(len(chart.groups))]
        axes.bar(places, [0.0 if value is None else value for value in values], width, label=name)
    if chart.level is not None:
        axes.axhline(chart.level, linestyle="--", color="gray")
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    axes.set_ylabel(chart.y_label)
    axes.legend()


def _matplotlib_heat_map(chart: HeatMap, figure: Any, axes: Any) -> None:
    values = [[float("nan") if value is None else value for value in row] for row in chart.values]
    known = [abs(value - chart.middle) for row in values for value in row if value == value]
    reach = max(known, default=1.0) or 1.0
    image = axes.imshow(values, cmap="RdYlGn", vmin=chart.middle - reach, vmax=chart.middle + reach, aspect="auto")
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            if value == value:
                axes.text(c, r, chart.number_format.format(value), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(chart.columns)), chart.columns)
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    figure.colorbar(image, ax=axes)
