"""The page of `paceline bench quantization`: advice, the matrix, drafters on each format, pictures."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from paceline.bench.analyse.format_advice import advice
from paceline.bench.analyse.formats import (
    FormatFigures,
    Quality,
    different_outputs,
    drafter_rows,
    format_figures,
    matrix_rows,
)
from paceline.bench.analyse.report import PAGE_WIDTH, PICTURE_HEIGHT, html_table, page_html
from paceline.bench.run.format_grid import NO_DRAFTER
from paceline.bench.run.results import Record
from paceline.errors import MissingExtraError
from paceline.lab.charts import BarChart, Chart, LineChart, Series, save, to_svg


def formats_page(
    records: Sequence[Record], qualities: Mapping[str, Quality], title: str, dollars_per_hour: float
) -> str:
    figures = format_figures(records, qualities)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in advice(figures))
    matrix = html_table(matrix_rows(figures, dollars_per_hour))
    parts = [
        f"<h1>{escape(title)}</h1><h2>Recommended</h2><ul>{sentences}</ul>{_doubts(records)}",
        f"<h2>The matrix</h2><p>{escape(explanation(qualities, dollars_per_hour))}</p><div class='all'>{matrix}</div>",
    ]
    if rows := drafter_rows(figures):
        parts.append(f"<h2>Drafters on each format</h2>{html_table(rows)}")
    parts.append(f"<h2>Pictures</h2>{_pictures(figures)}")
    return page_html(title, parts, records)


def explanation(qualities: Mapping[str, Quality], dollars_per_hour: float) -> str:
    return (
        f"KL (nats per token), same top (the share of positions with the same likeliest token) and perplexity are on "
        f"held-out text, against {next(iter(qualities))}. MB is what a pass reads. Speeds without a drafter, by number "
        f"of users; the price is at {dollars_per_hour:g} dollars per hour and the most users."
    )


def _doubts(records: Sequence[Record]) -> str:
    lines = [f"a drafter changed the text: {name}" for name in different_outputs(records)]
    if not lines:
        return "<p>No drafter changed a text on any format.</p>"
    return f"<h2 class='bad'>Doubtful</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def format_charts(figures: Sequence[FormatFigures]) -> list[Chart]:
    users = min((count for figure in figures for count in figure.plain), default=0)
    who = "1 user" if users == 1 else f"{users} users"
    points = [(figure, speed) for figure in figures if (speed := figure.speed(users)) is not None]
    quality = [
        Series(figure.name, [speed], [figure.quality["kl"]], points_only=True, labels=[figure.name])
        for figure, speed in points
    ]
    charts: list[Chart] = [
        LineChart(f"Quality against speed ({who}, no drafter)", "tokens/s", "KL from the reference, nats", quality)
    ]
    loads = [
        Series(figure.name, sorted(figure.plain), [figure.speed(count) or 0.0 for count in sorted(figure.plain)])
        for figure in figures
        if len(figure.plain) > 1
    ]
    if loads:
        charts.append(LineChart("Speed over users, no drafter", "users", "tokens/s", loads, log_x=True))
    return [*charts, *_drafter_charts(figures)]


def _drafter_charts(figures: Sequence[FormatFigures]) -> list[Chart]:
    names = list(dict.fromkeys(one.drafter for figure in figures for one in figure.drafted))
    drafters = [name for name in names if name != NO_DRAFTER]
    if not drafters:
        return []
    few = min(one.users for figure in figures for one in figure.drafted)
    found = {(figure.name, one.drafter): one for figure in figures for one in figure.drafted if one.users == few}
    groups = [figure.name for figure in figures]
    who = "1 user" if few == 1 else f"{few} users"

    def speedup(form: str, drafter: str) -> float | None:
        one = found.get((form, drafter))
        return None if one is None or one.speedup is None else one.speedup.value

    def length(form: str, drafter: str) -> float | None:
        one = found.get((form, drafter))
        return None if one is None else one.tokens_per_pass

    gains = [(drafter, [speedup(form, drafter) for form in groups]) for drafter in drafters]
    lengths = [(drafter, [length(form, drafter) for form in groups]) for drafter in drafters]
    return [
        BarChart(f"Speedup of speculation on each format ({who})", "speedup", groups, gains, level=1.0),
        BarChart(f"Tokens per pass on each format ({who})", "tokens", groups, lengths, level=1.0),
    ]


def save_charts(figures: Sequence[FormatFigures], folder: Path) -> list[Path]:
    """One .svg file each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, chart in enumerate(format_charts(figures), 1):
        paths.append(folder / f"formats-{number}.svg")
        save(chart, paths[-1])
    return paths


def _pictures(figures: Sequence[FormatFigures]) -> str:
    try:
        drawn = [to_svg(chart, PAGE_WIDTH, PICTURE_HEIGHT) for chart in format_charts(figures)]
    except MissingExtraError as error:
        return f"<p>There are no pictures on this page: {escape(str(error))}.</p>"
    return "".join(f"<figure>{picture}</figure>" for picture in drawn)
