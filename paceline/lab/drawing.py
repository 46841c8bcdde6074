"""How a chart looks: one drawing path, through matplotlib, for SVG and PNG.

Figures are made without pyplot, so nothing global is opened or changed. The text of an SVG depends on the chart alone:
no date, no version, ids by content. Its numbers are in pixels at the default width, its text stays text, and every
point, bar and cell has a <title> with its values, which a browser shows under the mouse.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from paceline.lab.charts import BarChart, Chart, HeatMap, LineChart, Series

if TYPE_CHECKING:
    from matplotlib.typing import LineStyleType

COLOURS = ("#1f6fb4", "#d1570e", "#2a8f3c", "#8a4fb0", "#b4232f", "#7a6a1f", "#3a9aa0", "#c05a9a", "#555555")
DASHES: "tuple[LineStyleType, ...]" = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
SVG_DPI = 72  # matplotlib writes SVG in points: at 72 per inch a unit is a pixel of the default width
PNG_SCALE = 1.5  # pixels of a PNG for each pixel of the SVG
HEAT_ROW, HEAT_REST, LEGEND_COLUMN = 30, 100, 210  # pixels: a row, title and axis together, a name in the legend
LOSS_TO_WIN = ("#d96a63", "#f8f8f8", "#4fae60")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib brings it, so every machine measures a text alike
    "font.size": 11,
    "axes.titlesize": 13,
    "text.parse_math": False,  # a "$" is a dollar
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
TITLED = "titled"  # an artist whose gid begins so gets a <title>: "titled|kind|number"


class Titles:
    """The texts that SVG elements get as their <title>, kept until the picture is text."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def give(self, artist: Artist, kind: str, text: str) -> None:
        artist.set_gid(f"{TITLED}|{kind}|{len(self.texts)}")
        self.texts.append(text)


def svg_text(chart: Chart, width: int, height: int) -> str:
    with _drawn(chart, width, height) as (figure, titles):
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=NO_METADATA)
        size = figure.get_size_inches() * SVG_DPI
    return _tidied(written.getvalue(), titles, round(size[0]), round(size[1]))


def png_bytes(chart: Chart, width: int, height: int) -> bytes:
    with _drawn(chart, width, height) as (figure, _):
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=SVG_DPI * PNG_SCALE, metadata={"Software": None})
        return written.getvalue()


@contextmanager
def _drawn(chart: Chart, width: int, height: int) -> Iterator[tuple[Figure, Titles]]:
    if isinstance(chart, HeatMap):
        height = HEAT_REST + HEAT_ROW * len(chart.rows)
    titles = Titles()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": chart.title}):  # ids differ between pictures of a page
        figure = Figure(figsize=(width / SVG_DPI, height / SVG_DPI), dpi=SVG_DPI, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(chart.title, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        if isinstance(chart, HeatMap):
            _heat_map(chart, axes, titles)
        elif isinstance(chart, BarChart):
            _bars(chart, axes, titles)
        else:
            _lines(chart, axes, titles)
        handles, names = axes.get_legend_handles_labels()
        if handles:
            columns = max(1, width // LEGEND_COLUMN)
            figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
        yield figure, titles


def _lines(chart: LineChart, axes: Axes, titles: Titles) -> None:
    colours = _colours([series.name for series in chart.series], chart.colours)
    for series in chart.series:
        _line(series, colours[series.name], axes, titles)
    xs = sorted({x for series in chart.series for x in series.x})
    if chart.level is not None:
        axes.axhline(chart.level, linestyle="--", linewidth=1, color="#777777", zorder=1)
    if chart.diagonal:
        values = xs + [y for series in chart.series for y in series.y] or [0.0, 1.0]
        axes.plot([min(values), max(values)], [min(values), max(values)], "--", linewidth=1, color="#777777", zorder=1)
    for x, y, label in chart.marks:
        (ring,) = axes.plot([x], [y], "o", markersize=12, fillstyle="none", color="black", markeredgewidth=1)
        titles.give(ring, "mark", label)
        axes.annotate(label, (x, y), textcoords="offset points", xytext=(0, 10), ha="center", fontsize=10)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log_x or (len(xs) <= 10 and all(float(x).is_integer() for x in xs)):
        axes.set_xticks(xs)  # K, rows, positions: name the ones that were measured
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    _value_axis(axes, chart.y_label)


def _line(series: Series, colour: str, axes: Axes, titles: Titles) -> None:
    style = "none" if series.points_only else DASHES[series.dash % len(DASHES)]
    marker = "o" if series.points_only else None  # in the legend
    if series.errors is not None:
        axes.errorbar(series.x, series.y, yerr=series.errors, fmt="none", ecolor=colour, elinewidth=1)
    axes.plot(series.x, series.y, linestyle=style, linewidth=2, color=colour, marker=marker, label=series.name)
    for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        own = series.point_colours[i] if series.point_colours else colour
        (point,) = axes.plot([x], [y], "o", markersize=6, color=own)
        titles.give(point, "point", series.titles[i] if series.titles else f"{series.name}: {x:.6g}, {y:.4g}")
        if series.labels:
            axes.annotate(series.labels[i], (x, y), textcoords="offset points", xytext=(5, 5), color=own, fontsize=10)


def _bars(chart: BarChart, axes: Axes, titles: Titles) -> None:
    colours = _colours([name for name, _ in chart.series], chart.colours)
    width = 0.8 / max(1, len(chart.series))
    for i, (name, values) in enumerate(chart.series):
        known = [(group, value) for group, value in enumerate(values) if value is not None]
        places = [group + (i - (len(chart.series) - 1) / 2) * width for group, _ in known]
        bars = axes.bar(places, [value for _, value in known], 0.95 * width, color=colours[name], label=name)
        for bar, (group, value) in zip(bars, known, strict=True):
            titles.give(bar, "bar", f"{chart.groups[group]}, {name}: {value:.3g}")
    if chart.level is not None:
        axes.axhline(chart.level, linestyle="--", linewidth=1, color="#777777")
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    _value_axis(axes, chart.y_label)


def _heat_map(chart: HeatMap, axes: Axes, titles: Titles) -> None:
    known = [abs(value - chart.middle) for row in chart.values for value in row if value is not None]
    shade = LinearSegmentedColormap.from_list("loss to win", LOSS_TO_WIN)
    scale = CenteredNorm(chart.middle, max(known, default=1.0) or 1.0)
    for r, row in enumerate(chart.values):
        for c, value in enumerate(row):
            shown = "–" if value is None else chart.number_format.format(value)
            colour = "#eeeeee" if value is None else shade(scale(value))
            cell = axes.add_patch(Rectangle((c - 0.5, r - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            titles.give(cell, "cell", f"{chart.rows[r]}, {chart.columns[c]}: {shown}")
            axes.text(c, r, shown, ha="center", va="center")
    axes.set_xlim(-0.5, len(chart.columns) - 0.5)
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(chart.columns)), chart.columns)
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    for label, column in zip(axes.get_xticklabels(), chart.columns, strict=True):
        label.set_color(chart.column_colours.get(column, "black"))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)


def _value_axis(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(axis="y", color="#dddddd")


def _number(value: float, _: int | None) -> str:
    return f"{value:.6g}"


def _colours(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    free = [colour for colour in COLOURS if colour not in given.values()] or list(COLOURS)
    unnamed = [name for name in names if name not in given]
    return dict(given) | {name: free[i % len(free)] for i, name in enumerate(unnamed)}


def _tidied(text: str, titles: Titles, width: int, height: int) -> str:
    """One <svg> element that can be in a page with others: no ids but those that are pointed to, and <title>s."""
    for prefix, namespace in (("", SVG), ("xlink", XLINK)):
        ElementTree.register_namespace(prefix, namespace)
    root = ElementTree.fromstring(text)
    for parent in root.iter():
        for style in parent.findall(f"{{{SVG}}}style"):
            parent.remove(style)  # it would hold for the whole page
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    root.set("width", str(width))
    root.set("height", str(height))
    for group in root.iter(f"{{{SVG}}}g"):
        name = group.attrib.pop("id", "")
        if name.startswith(TITLED):
            _, kind, number = name.split("|")
            title = ElementTree.Element(f"{{{SVG}}}title")
            title.text = titles.texts[int(number)]
            group.insert(0, title)
            group.set("class", kind)
        elif name:
            group.set("class", re.sub(r"^matplotlib\.|_\d+$", "", name))
    return ElementTree.tostring(root, encoding="unicode")
