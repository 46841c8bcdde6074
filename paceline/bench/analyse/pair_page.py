"""The page of `paceline bench pair`: sweet spots and studies first, then what every report has."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.bench.analyse.cells import analyse
from paceline.bench.analyse.pair import category_rows, pair_charts, sweet_spots, variant_rows, width_rows
from paceline.bench.analyse.report import PAGE_WIDTH, PICTURE_HEIGHT, html_table, report_html
from paceline.bench.run.results import Record
from paceline.errors import MissingExtraError
from paceline.lab.charts import to_svg
from paceline.lab.pass_cost import PassCost


def pair_page(records: Sequence[Record], curve: PassCost | None, title: str) -> str:
    analysis = analyse(records)
    spots, widths = [spot.row() for spot in sweet_spots(analysis, curve)], width_rows(analysis)
    parts = []
    if spots:
        parts.append(f"<h2>The sweet spot, beside the model's prediction</h2>{html_table(spots)}")
    if variants := variant_rows(analysis):
        parts.append(f"<h2>Ways to draft</h2>{html_table(variants)}")
    if categories := category_rows(analysis):
        parts.append(f"<h2>Acceptance by category</h2>{html_table(categories)}")
    if widths:
        parts.append(f"<h2>Width of the tree, and sampling rules</h2>{html_table(widths)}")
    parts.append(_pictures(records, curve))
    return report_html(records, title, sections="".join(parts))


def save_pair_charts(records: Sequence[Record], curve: PassCost | None, folder: Path) -> None:
    """pair-1.svg, pair-2.svg, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, chart in enumerate(pair_charts(records, curve), 1):
        (folder / f"pair-{number}.svg").write_text(to_svg(chart, PAGE_WIDTH, PICTURE_HEIGHT), encoding="utf-8")


def _pictures(records: Sequence[Record], curve: PassCost | None) -> str:
    try:
        drawn = [to_svg(chart, PAGE_WIDTH, PICTURE_HEIGHT) for chart in pair_charts(records, curve)]
    except MissingExtraError as error:
        return f"<p>There are no pictures of the pair: {escape(str(error))}.</p>"
    return "".join(f"<figure>{picture}</figure>" for picture in drawn)
