"""One self-contained HTML page from a sweep's records: the recommendation, the pictures, the table, the provenance.

Pictures (pictures.py) are inline SVG, as wide as the page; the page loads nothing and runs no script. Without
matplotlib (extra `plot`) the page has no pictures, and says so.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.bench.analyse.cells import Analysis, analyse, table
from paceline.bench.analyse.pictures import pictures
from paceline.bench.analyse.recommend import recommend
from paceline.bench.run.results import Record
from paceline.errors import MissingExtraError
from paceline.lab.charts import to_svg

PAGE_WIDTH, PICTURE_HEIGHT = 1200, 420  # pixels; on another screen the pictures grow and shrink with the page
STYLE = (
    f"body{{font:15px/1.5 system-ui,sans-serif;max-width:{PAGE_WIDTH}px;margin:2rem auto;padding:0 1rem;color:#222}}"
    "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ddd;padding:3px 8px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}figure{margin:0 0 2rem}figure svg{width:100%;height:auto}"
    "pre{background:#f6f6f6;padding:1rem;overflow-x:auto}.bad{color:#b4232f}.all{overflow-x:auto}"
)


def report_html(
    records: Sequence[Record], title: str = "Paceline benchmark", users: int | None = None, *, sections: str = ""
) -> str:
    """`users`: the load that the recommended configuration is for; by default one for all loads. `sections`: HTML that
    comes first."""
    analysis = analyse(records)
    parts = [
        f"<h1>{escape(title)}</h1>{sections}",
        _advice(recommend(analysis, users)),
        _warnings(analysis),
        f"<h2>Pictures</h2>{_pictures(analysis)}",
    ]
    return page_html(title, parts, records)


def page_html(title: str, parts: Sequence[str], records: Sequence[Record]) -> str:
    """A page of these parts; every cell and where it comes from stand at its end."""
    rows = table(analyse(records))
    parts = [
        *parts,
        f"<h2>All cells</h2><div class='all'>{html_table(rows)}</div>",
        f"<h2>Where this comes from</h2><pre>{escape(json.dumps(_provenance(records), indent=1))}</pre>",
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _advice(advice: Mapping[str, Any]) -> str:
    rows = [
        {
            "load": entry["load"],
            "setting": entry["setting"],
            "mean speedup": f"{entry['mean_speedup']:.2f}x",
            "worst cell": f"{entry['worst_speedup']:.2f}x",
            "cells": entry["num_points"],
            "loses at": "; ".join(entry["losses"]) or None,
        }
        for entry in advice["by_load"]
    ]
    parts = [f"<h2>Recommended</h2><p><b>{escape(advice['summary'])}.</b></p>{html_table(rows)}"]
    parts.append(f"<p>As one configuration: {escape(advice['reason'])}.</p>")
    if advice["incomplete"]:
        left_out = ", ".join(advice["incomplete"])
        parts.append(f"<p>Not compared over all loads, because not measured in all cells: {escape(left_out)}.</p>")
    if advice["speculative_config"]:
        config = {"speculative_config": advice["speculative_config"]}
        parts.append(f"<pre>{escape(json.dumps(config, indent=2))}</pre>")
    return "".join(parts)


def _pictures(analysis: Analysis) -> str:
    try:
        drawn = [to_svg(chart, PAGE_WIDTH, PICTURE_HEIGHT) for chart in pictures(analysis)]
    except MissingExtraError as error:
        return f"<p>There are no pictures on this page: {escape(str(error))}.</p>"
    return "".join(f"<figure>{picture}</figure>" for picture in drawn)


def _warnings(analysis: Analysis) -> str:
    lines = [f"{record['cell']['setting']}: {record.get('error')}" for record in analysis.failed]
    lines += [f"outputs differ from plain decoding: {name}" for name in analysis.different_outputs()]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2 class='bad'>Failed or doubtful ({len(lines)})</h2><p>Not part of any figure below.</p><ul>{items}</ul>"


def html_table(rows: Sequence[dict[str, Any]]) -> str:
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
