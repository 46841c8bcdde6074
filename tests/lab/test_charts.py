"""Charts are well-formed, show their data, and say what to do where a picture cannot be drawn."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.errors import InvalidOptionError
from paceline.lab.charts import BarChart, Chart, HeatMap, LineChart, Series, save, to_svg
from paceline.lab.svg import ticks

CHARTS: list[Chart] = [
    LineChart(
        "A & B",
        "K",
        "speedup",
        [Series("<n-gram>", [1, 2, 4], [1.0, 1.4, 1.2], errors=[0.1, 0.1, 0.1]), Series("one", [2], [1.1])],
        level=1.0,
        log_x=True,
        marks=[(2, 1.4, "best")],
    ),
    LineChart("points", "x", "y", [Series("p", [1.0, 2.0], [1.0, 2.1], points_only=True)], diagonal=True),
    BarChart("bars", "y", ["chat", "code"], [("ngram", [1.0, None]), ("suffix", [1.2, 1.4])], level=1.0),
    HeatMap("map", "K", "concurrency", ["2", "4"], ["1", "8"], [[1.5, 0.9], [None, 1.0]]),
]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_svg_is_well_formed_and_complete(chart: Chart) -> None:
    root = ElementTree.fromstring(to_svg(chart))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert chart.title in texts
    if isinstance(chart, HeatMap):
        assert {"1.50", "0.90", "–", "1.00"} <= set(texts)
    if isinstance(chart, LineChart):
        circles = [e for e in root.iter() if e.tag.endswith("circle")]
        assert len(circles) == sum(len(series.x) for series in chart.series) + len(chart.marks)


def test_points_stand_where_their_values_are() -> None:
    chart = LineChart("t", "x", "y", [Series("s", [0, 1, 2], [0.0, 1.0, 2.0])])
    root = ElementTree.fromstring(to_svg(chart))
    centres = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in root.iter() if e.tag.endswith("circle")]
    (x0, y0), (x1, y1), (x2, y2) = centres
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x0 < x1 and y0 > y1  # pixels grow downwards


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 250.0), (0.97, 1.03), (1e-6, 2e-6)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 8
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)


def test_files(tmp_path: Path) -> None:
    save(CHARTS[0], tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")
    with pytest.raises(InvalidOptionError, match=r"\.svg or \.png"):
        save(CHARTS[0], tmp_path / "chart.gif")


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_png(chart: Chart, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(chart, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(InvalidOptionError, match=r"paceline\[plot\]"):
        save(CHARTS[0], tmp_path / "chart.png")
