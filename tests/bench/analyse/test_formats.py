"""The matrix from records: ratios within a round, what drafters gain on each format, and the advice."""

from pathlib import Path
from typing import Any

import pytest

from paceline.bench.analyse.format_advice import advice
from paceline.bench.analyse.formats import different_outputs, drafter_rows, format_figures, matrix_rows
from paceline.bench.analyse.formats_page import format_charts, formats_page, save_charts
from paceline.bench.run.results import Record

SPEEDS = {  # format -> drafter -> users -> tokens/s in two rounds; the second round's machine is half as fast
    "full": {"none": {1: (100, 50), 8: (400, 200)}, "ngram": {1: (150, 75)}},
    "awq": {"none": {1: (200, 100), 8: (500, 250)}, "ngram": {1: (220, 110)}},
    "bad": {"none": {1: (300, 150), 8: (900, 450)}, "ngram": {1: (240, 120)}},
}
QUALITIES: dict[str, dict[str, Any]] = {
    "full": {"kl": 0.0, "same_top": 1.0, "perplexity": 10.0, "exact_match": 0.5, "bytes": 500_000_000},
    "awq": {"kl": 0.01, "same_top": 0.95, "perplexity": 10.1, "exact_match": 0.5, "bytes": 120_000_000},
    "bad": {"kl": 0.5, "same_top": 0.6, "perplexity": 14.0, "exact_match": None, "bytes": 100_000_000},
}
for quality in QUALITIES.values():
    quality["reference_perplexity"] = 10.0


def record(form: str, drafter: str, users: int, repeat: int, speed: float, output: str = "same") -> Record:
    cell = {"format": form, "setting": f"{form}, {drafter}", "speculative_config": {"method": drafter}}
    cell |= {"workload": "chat", "temperature": 0.0, "concurrency": users, "rate_per_s": None, "repeat": repeat}
    speculation = {"mean_acceptance_length": 1.0 if drafter == "none" else 1.8}
    summary = {"tokens_per_s": speed, "tokens_per_s_per_user": speed / users, "speculation": speculation}
    summary |= {"ttft_s": {"p50": 0.02}}
    requests = [{"prompt_id": "chat-0", "output_hash": f"{form}-{output}"}]
    key = f"{form} {drafter} {users} {repeat}"
    return {"key": key, "status": "ok", "cell": cell, "summary": summary, "requests": requests}


def records() -> list[Record]:
    return [
        record(form, drafter, users, repeat, speed)
        for form, drafters in SPEEDS.items()
        for drafter, loads in drafters.items()
        for users, speeds in loads.items()
        for repeat, speed in enumerate(speeds)
    ]


def test_ratios_are_taken_within_a_round() -> None:
    full, awq, _ = format_figures(records(), QUALITIES)
    assert {users: ratio.value for users, ratio in awq.of_reference.items()} == {1: 2.0, 8: 1.25}
    gains = {one.drafter: one.speedup.value for one in full.drafted if one.speedup is not None}
    assert gains == {"ngram": 1.5}
    rows = {(row["format"], row["drafter"]): row for row in drafter_rows([full, awq])}
    assert rows["awq", "ngram"]["speedup"] == 1.1 and rows["awq", "ngram"]["interval"] == "1.10..1.10"
    assert rows["awq", "ngram"]["tokens/pass"] == 1.8 and ("awq", "none") not in rows


def test_the_matrix_has_a_row_per_format() -> None:
    rows = matrix_rows(format_figures(records(), QUALITIES), dollars_per_hour=3.6)
    assert [row["format"] for row in rows] == ["full", "awq", "bad"]
    assert rows[1]["MB"] == 120.0 and rows[1]["tok/s, 8"] == 375.0 and rows[1]["of ref., 8"] == "1.25x"
    assert rows[1]["first token ms"] == 20.0 and rows[2]["exact"] is None
    assert rows[0]["$/M tokens"] == pytest.approx(3.6 / (300 * 3600) * 1e6, abs=1e-3)


def test_the_advice_is_the_fastest_that_keeps_the_quality() -> None:
    said = advice(format_figures(records(), QUALITIES))
    assert said[0].startswith("For 1 user take awq with ngram: 165.0 tokens/s, 2.20x the reference without a drafter")
    assert said[1].startswith("For 8 users take awq with no drafter: 375.0 tokens/s")
    assert "bad (+40.0%)" in said[2]
    assert "Nearest to the reference is awq" in said[3] and "the smallest is bad (100 MB)" in said[3]
    assert "most on full (1.50x with ngram, 1.80 tokens per pass) and least on bad (0.80x" in said[4]


def test_a_drafter_that_changes_the_text_is_named() -> None:
    assert different_outputs(records()) == []
    bad = [*records(), record("awq", "auto", 1, 0, 100.0, output="other")]
    assert different_outputs(bad) == ["awq, auto with 1 users: chat-0"]
    assert "a drafter changed the text" in formats_page(bad, QUALITIES, "t", 1.0)


def test_the_page_has_the_advice_the_tables_and_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = formats_page(records(), QUALITIES, "Formats of m", 1.0)
    for text in (
        "Recommended",
        "take awq with ngram",
        "The matrix",
        "Drafters on each format",
        "<svg",
        "No drafter changed",
    ):
        assert text in page
    figures = format_figures(records(), QUALITIES)
    assert [chart.title for chart in format_charts(figures)] == [
        "Quality against speed (1 user, no drafter)",
        "Speed over users, no drafter",
        "Speedup of speculation on each format (1 user)",
        "Tokens per pass on each format (1 user)",
    ]
    assert [path.name for path in save_charts(figures, tmp_path / "plots")] == [f"formats-{i}.svg" for i in range(1, 5)]
