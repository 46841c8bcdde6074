"""Charts as data: lines, bars and heat maps. `drawing.py` draws them with matplotlib (extra `plot`).

A chart says what is shown, and never how. The same chart becomes a file (`save`) or a part of a page (`to_svg`).
matplotlib is imported when the first chart is drawn, so a command without a picture does not wait for it.

>>> chart = LineChart("Tokens per step", "K", "tokens", [Series("g = 0.8", [1, 2, 3], [1.8, 2.44, 2.95])])
>>> save(chart, "tokens.svg")                                                      # doctest: +SKIP
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import InvalidOptionError, MissingExtraError

FORMATS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Its colour is `LineChart.colours[name]`, or the next free one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] | None = None  # half widths of the intervals around y
    points_only: bool = False
    labels: Sequence[str] = ()  # written at the points, one each
    titles: Sequence[str] = ()  # shown when the mouse is over a point (SVG), one each; default: name and values
    point_colours: Sequence[str] = ()  # one each, where points differ from their line
    dash: int = 0  # which of the dash patterns, for lines of one colour


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
    colours: Mapping[str, str] = field(default_factory=dict)  # name of a series -> colour


@dataclass(frozen=True, slots=True)
class BarChart:
    title: str
    y_label: str
    groups: Sequence[str]  # along the x axis
    series: Sequence[tuple[str, Sequence[float | None]]]  # name, one value per group; None: not measured
    level: float | None = None
    colours: Mapping[str, str] = field(default_factory=dict)  # name of a series -> colour


@dataclass(frozen=True, slots=True)
class HeatMap:
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]  # [row][column]; None: not measured
    middle: float = 1.0  # neither won nor lost: red below, green above
    number_format: str = "{:.2f}"
    column_colours: Mapping[str, str] = field(default_factory=dict)  # column -> colour of its name


Chart = LineChart | BarChart | HeatMap


def to_svg(chart: Chart, width: int = 640, height: int = 380) -> str:
    """One <svg> element. The same chart always gives the same text. A heat map's height follows from its rows."""
    check_matplotlib()
    from paceline.lab.drawing import svg_text

    return svg_text(chart, width, height)


def save(chart: Chart, path: str | Path) -> None:
    """Write the chart; the file's ending chooses the format (.svg or .png)."""
    check_plot(path)
    path = Path(path)
    if path.suffix.lower() == ".svg":
        path.write_text(to_svg(chart) + "\n", encoding="utf-8")
    else:
        from paceline.lab.drawing import png_bytes

        path.write_bytes(png_bytes(chart, 640, 380))


def check_plot(path: str | Path) -> None:
    """Raise where `save` could not write this file. Ask before hours of measuring, not after."""
    if Path(path).suffix.lower() not in FORMATS:
        raise InvalidOptionError(f"a plot is a .svg or .png file, got {str(path)!r}")
    check_matplotlib()


def check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("a picture", "matplotlib", "plot") from error
