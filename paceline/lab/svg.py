"""Charts drawn as SVG text: no library, no script, readable in a browser and in a diff.

Everything is placed by a `Frame`, which maps data to pixels and draws the axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.lab.charts import BarChart, HeatMap, LineChart

COLOURS = ("#1f6fb4", "#d1570e", "#2a8f3c", "#8a4fb0", "#b4232f", "#7a6a1f", "#3a9aa0", "#c05a9a", "#555555")
FONT = "font-family='system-ui,sans-serif'"
TITLE_HEIGHT, AXIS_WIDTH, AXIS_HEIGHT, LEGEND_ROW = 34, 62, 48, 18


@dataclass(frozen=True, slots=True)
class Frame:
    """The plotting area, and how data maps into it."""

    left: float
    top: float
    right: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log_x: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_low, self.x_high
        if self.log_x:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)


def line_chart(chart: "LineChart", width: int, height: int) -> str:
    xs = [x for series in chart.series for x in series.x] or [0.0, 1.0]
    ys = [y for series in chart.series for y in series.y] or [0.0, 1.0]
    spread = [e for series in chart.series for e in (series.errors or ())]
    if chart.level is not None:
        ys.append(chart.level)
    y_low, y_high = padded(min(ys) - max(spread, default=0.0), max(ys) + max(spread, default=0.0))
    x_low, x_high = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) * 0.5, max(xs) * 1.5 + 1e-9)
    frame = Frame(
        AXIS_WIDTH,
        TITLE_HEIGHT,
        width - 16,
        height - AXIS_HEIGHT - LEGEND_ROW * legend_rows(len(chart.series)),
        x_low,
        x_high,
        y_low,
        y_high,
        chart.log_x,
    )
    whole = all(float(x).is_integer() for x in xs)  # K, rows, positions: name the ones that were measured
    x_ticks = sorted(set(xs)) if chart.log_x or (whole and len(set(xs)) <= 10) else ticks(x_low, x_high)
    parts = [axes(frame, x_ticks, ticks(y_low, y_high)), labels(frame, chart.title, chart.x_label, chart.y_label)]
    if chart.level is not None:
        parts.append(dashed(frame.left, frame.y(chart.level), frame.right, frame.y(chart.level)))
    if chart.diagonal:
        low, high = max(x_low, y_low), min(x_high, y_high)
        parts.append(dashed(frame.x(low), frame.y(low), frame.x(high), frame.y(high)))
    for i, series in enumerate(chart.series):
        colour = COLOURS[i % len(COLOURS)]
        points = [(frame.x(x), frame.y(y)) for x, y in zip(series.x, series.y, strict=True)]
        if not series.points_only:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in points]
        for x, y, error in zip(series.x, series.y, series.errors or (), strict=False):
            low, high = frame.y(y - error), frame.y(y + error)
            parts.append(f"<path d='M{frame.x(x):.1f} {low:.1f}V{high:.1f}' stroke='{colour}' stroke-width='1'/>")
    for x, y, label in chart.marks:
        parts.append(f"<circle cx='{frame.x(x):.1f}' cy='{frame.y(y):.1f}' r='7' fill='none' stroke='black'/>")
        parts.append(text(frame.x(x), frame.y(y) - 11, label, size=11))
    parts.append(legend([series.name for series in chart.series], frame, width))
    return document(parts, width, height)


def bar_chart(chart: "BarChart", width: int, height: int) -> str:
    known = [value for _, values in chart.series for value in values if value is not None]
    high = max([*known, chart.level or 0.0, 1e-9])
    frame = Frame(
        AXIS_WIDTH,
        TITLE_HEIGHT,
        width - 16,
        height - AXIS_HEIGHT - LEGEND_ROW * legend_rows(len(chart.series)),
        0.0,
        float(max(1, len(chart.groups))),
        0.0,
        high * 1.08,
    )
    parts = [axes(frame, [], ticks(0.0, frame.y_high)), labels(frame, chart.title, "", chart.y_label)]
    slot = 0.8 / max(1, len(chart.series))
    for g, group in enumerate(chart.groups):
        parts.append(text(frame.x(g + 0.5), frame.bottom + 16, group, size=11))
        for i, (name, values) in enumerate(chart.series):
            value = values[g]
            if value is None:
                continue
            left, right = frame.x(g + 0.1 + i * slot), frame.x(g + 0.1 + (i + 1) * slot)
            top = frame.y(value)
            parts.append(
                f"<rect x='{left:.1f}' y='{top:.1f}' width='{right - left - 1:.1f}' height='{frame.bottom - top:.1f}' "
                f"fill='{COLOURS[i % len(COLOURS)]}'><title>{escape(f'{group}, {name}: {value:.3g}')}</title></rect>"
            )
    if chart.level is not None:
        parts.append(dashed(frame.left, frame.y(chart.level), frame.right, frame.y(chart.level)))
    parts.append(legend([name for name, _ in chart.series], frame, width))
    return document(parts, width, height)


def heat_map(chart: "HeatMap", width: int) -> str:
    left, cell_height = 150, 30
    cell_width = (width - left - 16) / max(1, len(chart.columns))
    bottom = TITLE_HEIGHT + cell_height * len(chart.rows)
    known = [abs(value - chart.middle) for row in chart.values for value in row if value is not None]
    reach = max(known, default=1.0) or 1.0
    frame = Frame(left, TITLE_HEIGHT, width - 16, bottom, 0, 1, 0, 1)
    parts = [labels(frame, chart.title, chart.x_label, chart.y_label)]
    for r, (name, row) in enumerate(zip(chart.rows, chart.values, strict=True)):
        y = TITLE_HEIGHT + r * cell_height
        parts.append(text(left - 8, y + cell_height * 0.65, name, anchor="end", size=12))
        for c, value in enumerate(row):
            x = left + c * cell_width
            fill = "#eeeeee" if value is None else shade((value - chart.middle) / reach)
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{cell_width - 1:.1f}' height='{cell_height - 1}' fill='{fill}'/>"
            )
            shown = "–" if value is None else chart.number_format.format(value)
            parts.append(text(x + cell_width / 2, y + cell_height * 0.65, shown, size=12))
    for c, column in enumerate(chart.columns):
        parts.append(text(left + (c + 0.5) * cell_width, bottom + 16, column, size=12))
    return document(parts, width, bottom + AXIS_HEIGHT)


def shade(amount: float) -> str:
    """-1 is red, 0 is pale, 1 is green."""
    amount = max(-1.0, min(1.0, amount))
    end = (46, 160, 67) if amount >= 0 else (209, 60, 50)
    mixed = [round(248 + (channel - 248) * abs(amount) * 0.85) for channel in end]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers inside [low, high]: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def padded(low: float, high: float) -> tuple[float, float]:
    gap = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - gap, high + gap


def axes(frame: Frame, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f"<path d='M{frame.left} {y:.1f}H{frame.right}' stroke='#dddddd'/>")
        parts.append(text(frame.left - 6, y + 4, f"{tick:.6g}", anchor="end", size=11))
    for tick in x_ticks:
        parts.append(f"<path d='M{frame.x(tick):.1f} {frame.bottom}v4' stroke='#444444'/>")
        parts.append(text(frame.x(tick), frame.bottom + 16, f"{tick:.6g}", size=11))
    parts.append(f"<path d='M{frame.left} {frame.top}V{frame.bottom}H{frame.right}' fill='none' stroke='#444444'/>")
    return "".join(parts)


def labels(frame: Frame, title: str, x_label: str, y_label: str) -> str:
    middle_x, middle_y = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    turned = f"<g transform='translate(14 {middle_y:.0f}) rotate(-90)'>{text(0, 0, y_label, size=12)}</g>"
    return text(middle_x, 20, title, size=15, weight="600") + text(middle_x, frame.bottom + 34, x_label) + turned


def legend_rows(num_series: int) -> int:
    return math.ceil(num_series / 3)


def legend(names: Sequence[str], frame: Frame, width: int) -> str:
    parts = []
    for i, name in enumerate(names):
        x = AXIS_WIDTH + (i % 3) * (width - AXIS_WIDTH) / 3
        y = frame.bottom + AXIS_HEIGHT + (i // 3) * LEGEND_ROW
        parts.append(f"<rect x='{x:.1f}' y='{y - 9:.1f}' width='12' height='8' fill='{COLOURS[i % len(COLOURS)]}'/>")
        parts.append(text(x + 17, y, name, anchor="start", size=11))
    return "".join(parts)


def text(x: float, y: float, content: str, *, anchor: str = "middle", size: int = 12, weight: str = "400") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}'>"
        f"{escape(content)}</text>"
    )


def dashed(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<path d='M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}' stroke='#777777' stroke-dasharray='5 4'/>"


def document(parts: Sequence[str], width: int, height: float) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height:.0f}' width='{width}' "
        f"height='{height:.0f}' {FONT} fill='#222222'>"
        f"<rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>"
    )
