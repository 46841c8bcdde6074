"""Charts are well-formed, show their data, and say what to do where a picture cannot be drawn."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import InvalidOptionError, MissingExtraError
from paceline.lab.charts import BarChart, Chart, HeatMap, LineChart, Series, check_plot, save, to_svg

SVG = "{http://www.w3.org/2000/svg}"
LINES = LineChart(
    "A & B",
    "K",
    "speedup",
    [Series("<n-gram>", [1, 2, 4], [1.0, 1.4, 1.2], errors=[0.1, 0.1, 0.1]), Series("one", [2], [1.1])],
    level=1.0,
    log_x=True,
    marks=[(2, 1.4, "best")],
)
BARS = BarChart("bars", "y", ["chat", "code"], [("ngram", [1.0, None]), ("suffix", [1.2, 1.4])], level=1.0)
CHARTS: list[Chart] = [
    LINES,
    LineChart("points", "x", "y", [Series("p", [1.0, 2.0], [1.0, 2.1], points_only=True)], diagonal=True),
    BARS,
    HeatMap("map", "K", "concurrency", ["2", "4"], ["1", "8"], [[1.5, 0.9], [None, 1.0]]),
    LineChart("nothing measured", "x", "y", []),
]


def groups(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]


def titles(root: ElementTree.Element, kind: str) -> list[str | None]:
    return [group.findtext(f"{SVG}title") for group in groups(root, kind)]


def words(root: ElementTree.Element) -> list[str | None]:
    return [element.text for element in root.iter(f"{SVG}text")]


def run_python(code: str) -> str:
    command = [sys.executable, "-X", "utf8", "-c", code]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, encoding="utf-8", check=True)
    return ran.stdout


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_svg_is_well_formed_and_complete(chart: Chart) -> None:
    root = ElementTree.fromstring(to_svg(chart))
    assert chart.title in words(root)
    if isinstance(chart, HeatMap):
        assert {"1.50", "0.90", "–", "1.00"} <= set(words(root))
        assert len(groups(root, "cell")) == 4
    if isinstance(chart, LineChart):
        assert len(groups(root, "point")) == sum(len(series.x) for series in chart.series)
        assert len(groups(root, "mark")) == len(chart.marks)


def test_points_are_drawn_where_their_values_are() -> None:
    chart = LineChart("t", "x", "y", [Series("s", [0, 1, 2], [0.0, 1.0, 2.0])])
    root = ElementTree.fromstring(to_svg(chart))
    centres = [next(point.iter(f"{SVG}use")) for point in groups(root, "point")]
    (x0, y0), (x1, y1), (x2, y2) = [(float(e.get("x", "")), float(e.get("y", ""))) for e in centres]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x0 < x1 and y0 > y1  # pixels grow downwards


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 250.0), (0.97, 1.03), (1e-6, 2e-6)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    root = ElementTree.fromstring(to_svg(LineChart("t", "x", "y", [Series("s", [0, 1], [low, high])])))
    marks = [float(word or "") for tick in groups(root, "ytick") for word in words(tick)]
    room = 0.1 * (high - low)  # above and below the data
    assert 2 <= len(marks) <= 10
    assert all(low - room <= mark <= high + room for mark in marks)


def test_points_bars_and_cells_say_their_values() -> None:
    labelled = Series("auto", [10, 40], [10, 5], labels=["1", "8"], titles=["1 user", "8 users"])
    root = ElementTree.fromstring(to_svg(LineChart("t", "x", "y", [labelled])))
    assert titles(root, "point") == ["1 user", "8 users"]
    assert {"1", "8"} <= set(words(root))
    assert titles(ElementTree.fromstring(to_svg(BARS)), "bar") == [
        "chat, ngram: 1",
        "chat, suffix: 1.2",
        "code, suffix: 1.4",
    ]


def test_a_series_has_the_colour_that_was_given_in_every_kind_of_chart() -> None:
    for chart in (LINES, BARS):
        name = next(iter(chart.series))
        given = {name.name if isinstance(name, Series) else name[0]: "#123456"}
        assert "#123456" in to_svg(replace(chart, colours=given)) and "#123456" not in to_svg(chart)


def test_a_dollar_sign_is_no_formula() -> None:
    assert "$1 and $2" in to_svg(LineChart("$1 and $2", "x", "$", []))


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_the_same_chart_is_always_the_same_text_without_a_date(chart: Chart) -> None:
    draw = f"print(to_svg(CHARTS[{CHARTS.index(chart)}]), end='')"
    elsewhere = run_python(f"from tests.lab.test_charts import CHARTS, to_svg; {draw}")
    assert to_svg(chart) == elsewhere
    assert "metadata" not in elsewhere and "<style" not in elsewhere


def test_drawing_opens_no_pyplot() -> None:
    draw = "from paceline.lab.charts import *; to_svg(BarChart('t', 'y', [], []))"
    run_python(f"import sys; {draw}; assert 'matplotlib.pyplot' not in sys.modules")


def test_charts_import_no_matplotlib_before_one_is_drawn() -> None:
    imports = "import sys, paceline.lab.charts, paceline.cli.lab, paceline.cli.bench"
    run_python(f"{imports}; assert 'matplotlib' not in sys.modules")


def test_the_ending_of_a_file_chooses_its_format(tmp_path: Path) -> None:
    save(CHARTS[0], tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")
    with pytest.raises(InvalidOptionError, match=r"\.svg or \.png"):
        save(CHARTS[0], tmp_path / "chart.gif")


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_every_chart_can_be_a_png(chart: Chart, tmp_path: Path) -> None:
    save(chart, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["chart.png", "chart.svg"])
def test_without_matplotlib_the_error_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[plot\]'"):
        save(CHARTS[0], tmp_path / name)
    with pytest.raises(InvalidOptionError, match=r"paceline\[plot\]"):
        check_plot(tmp_path / name)
    assert not (tmp_path / name).exists()
