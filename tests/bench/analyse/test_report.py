"""From records to figures, pictures, advice and verdicts, on records whose answers are known."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.analyse.cells import Point, analyse, by_category, table
from paceline.bench.analyse.pictures import colours_of, pictures
from paceline.bench.analyse.predict import chart, predictions
from paceline.bench.analyse.report import PAGE_WIDTH, report_html
from paceline.bench.claims.never_slower import heat_map, verdicts
from paceline.errors import InvalidOptionError
from paceline.lab.charts import HeatMap, LineChart, Series, to_svg
from paceline.lab.pass_cost import PassCost

CURVE = PassCost.of({1: 0.010, 5: 0.014, 8: 0.020, 40: 0.080})


def record(setting: str, concurrency: int, tokens_per_s: float, repeat: int = 0, **more: Any) -> dict[str, Any]:
    method, _, k = setting.partition(":")
    config: dict[str, Any] = {"method": "none" if method == "plain" else method}
    if k:
        config["num_speculative_tokens"] = int(k)
    plain = method == "plain"
    num_tokens, per_pass = 800, 1.0 if plain else 2.0
    steps = int(num_tokens / per_pass)
    summary = {
        "wall_s": num_tokens / tokens_per_s,
        "num_output_tokens": num_tokens,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_user": tokens_per_s / concurrency,
        "ttft_s": {"p50": 0.1},
        "inter_token_s": {"p95": 0.02},
        "e2e_s": {"p99": 1.0},
        "speculation": {
            "num_steps": steps,
            "num_drafts": 0 if plain else steps,
            "num_draft_tokens": 0 if plain else 4 * steps,
            "mean_acceptance_length": per_pass,
            "draft_acceptance_rate": 0.25,
            "acceptance_by_position": [] if plain else [0.6, 0.4],
        },
        "by_category": {"chat": {"tokens_per_s_per_user": tokens_per_s / concurrency}},
        "engine": {"num_passes": steps / concurrency, "draft_s": 0.0},
    }
    cell = {
        "setting": setting,
        "speculative_config": config,
        "workload": "chat",
        "temperature": 0.0,
        "concurrency": concurrency,
        "rate_per_s": None,
        "repeat": repeat,
    }
    facts = {"commit": "abc", "time": f"2024-01-0{repeat + 1}", "machine": {"cpu": "x"}, "versions": {}, "command": []}
    key = f"{setting}/{concurrency}/{repeat}"
    requests = [{"prompt_id": "a", "output_hash": more.pop("output", "same")}]
    result = {"key": key, "status": "ok", "cell": cell, "summary": summary, "provenance": facts, "requests": requests}
    return result | more


def sweep() -> list[dict[str, Any]]:
    records = []
    for repeat in range(3):
        drift = 1 + 0.1 * repeat  # the machine is faster in later repeats, by as much for all settings of a repeat
        for setting, one_user, eight_users in [("plain", 100, 400), ("ngram:4", 150, 300), ("suffix:8", 180, 396)]:
            records.append(record(setting, 1, one_user * drift, repeat))
            records.append(record(setting, 8, eight_users * drift, repeat))
        records += [record("auto", 1, 175 * drift, repeat), record("auto", 8, 404 * drift, repeat)]
    return records


def test_speedups_are_taken_within_a_repeat() -> None:
    analysis = analyse(sweep())
    cell = analysis.cells["ngram:4", Point("chat", 0.0, 1)]
    assert cell.speedups == pytest.approx([1.5, 1.5, 1.5])
    assert cell.tokens_per_s.value == pytest.approx(165)
    assert cell.speedup is not None and cell.speedup.coverage == 0.75
    assert by_category(analysis)["ngram:4"]["chat"] == pytest.approx((1.5 + 0.75) / 2)
    assert len(table(analysis)) == 8


def test_failed_runs_are_left_out_and_named() -> None:
    records = [*sweep(), record("suffix:4", 1, 1.0, status="failed", error="server died")]
    analysis = analyse(records)
    assert ("suffix:4", Point("chat", 0.0, 1)) not in analysis.cells
    assert "server died" in report_html(records)
    with pytest.raises(InvalidOptionError, match="no successful run"):
        analyse([record("plain", 1, 1.0, status="failed")])


def test_outputs_that_differ_from_plain_are_shown() -> None:
    records = sweep()
    assert analyse(records).different_outputs() == []
    records.append(record("ngram:9", 1, 120.0, output="other"))
    assert analyse(records).different_outputs() == ["ngram:9 at chat, T=0, load 1"]
    assert "outputs differ from plain decoding" in report_html(records)


def test_verdicts_are_against_plain_and_the_best() -> None:
    found = verdicts(analyse(sweep()))
    assert [(v.best, round(v.of_plain.value, 2), round(v.of_best.value, 2)) for v in found] == [
        ("suffix:8", 1.75, 0.97),
        ("plain", 1.01, 1.01),
    ]
    assert "1.75" in to_svg(heat_map(found))


def test_verdicts_compare_runs_of_the_same_repeat() -> None:
    """The machine is slower in each round: medians of the settings' speeds would come from different rounds."""
    speeds = {"plain": (100.0, 60.0, 30.0), "suffix:4": (120.0, 50.0, 36.0), "auto": (118.0, 71.0, 35.0)}
    records = [record(name, 1, speed, repeat) for name, all_of in speeds.items() for repeat, speed in enumerate(all_of)]
    [found] = verdicts(analyse(records))
    assert found.best == "suffix:4"
    assert found.of_best.value == pytest.approx(118 / 120) and found.of_plain.value == pytest.approx(118 / 100)


def test_the_model_explains_a_speedup_computed_by_hand() -> None:
    """One user, 2 tokens per pass, 4 nodes: T(5)/T(1) = 1.4, so 2 / 1.4 = 1.43 where the plain run is all passes."""
    records = [record("plain", 1, 100.0), record("ngram:4", 1, 140.0)]
    (prediction,) = predictions(analyse(records), {0.0: CURVE})
    assert prediction.explained == pytest.approx(2 / 1.4) and prediction.predicted is None
    assert prediction.row()["explains: within"] == "yes"
    assert "explained" in to_svg(chart([prediction]))


def test_the_explanation_does_not_change_on_a_machine_that_became_slower() -> None:
    """The curve was taken at 10 ms for a step of one row; in the second repeat a step takes 30 ms."""
    records = [record(setting, 1, speed) for setting, speed in (("plain", 100.0), ("ngram:4", 140.0))]
    slower = [record(setting, 1, speed, repeat=1) for setting, speed in (("plain", 33.3), ("ngram:4", 46.6))]
    slower[0]["summary"]["inter_token_s"]["p50"] = 3 * CURVE(1)
    (prediction,) = predictions(analyse([*records, *slower]), {0.0: CURVE})
    assert prediction.explained == pytest.approx(2 / 1.4, rel=0.01)


def test_the_page_is_self_contained_and_complete(tmp_path: Path) -> None:
    page = report_html(sweep(), title="A <test>")
    assert "A &lt;test&gt;" in page and "<script" not in page
    outside = re.findall(r"""(?:src|href)=['"]([^'"#][^'"]*)""", page)  # "#name" is a part of the page itself
    assert outside == []
    for title in ("Speedup over K", "Acceptance by position", "Speed per user against total", "Where it wins"):
        assert title in page
    assert page.count("<svg") >= 5
    assert (
        json.dumps({"speculative_config": {"method": "suffix", "num_speculative_tokens": 8}}, indent=2).replace(
            '"', "&quot;"
        )
        in page
    )


def test_the_page_recommends_by_load_and_names_losses() -> None:
    page = report_html([r for r in sweep() if r["cell"]["setting"] in ("plain", "ngram:4")])
    assert "1 user: ngram:4; 8 users and more: plain" in page
    assert "it loses at chat, T=0, 8 users: 0.75x" in page
    for_one = report_html([r for r in sweep() if r["cell"]["setting"] in ("plain", "ngram:4")], users=1)
    assert "ngram:4 has the best mean speedup at 1 user, 1.50x over 1 cell; it loses nowhere" in for_one


def test_a_setting_has_one_colour_in_all_pictures_and_no_other_setting_has_it() -> None:
    analysis = analyse([*sweep(), *(record("ngram:2", users, 110.0 * users) for users in (1, 8))])
    colours = colours_of(analysis).of_setting
    assert set(colours) == {"plain", "auto", "ngram:2", "ngram:4", "suffix:8"} and len(set(colours.values())) == 5
    seen: dict[str, set[str]] = {}
    for drawn in pictures(analysis):
        if isinstance(drawn, HeatMap):
            for column in drawn.columns:
                seen.setdefault(column, set()).add(drawn.column_colours[column])
            continue
        for series in drawn.series:
            name = series.name if isinstance(series, Series) else series[0]
            if name in colours:
                seen.setdefault(name, set()).add(drawn.colours[name])
            elif isinstance(series, Series):  # a method over K: its points are settings
                for title, colour in zip(series.titles, series.point_colours, strict=True):
                    seen.setdefault(title.partition(",")[0], set()).add(colour)
    assert seen == {setting: {colour} for setting, colour in colours.items()}


def test_points_say_how_many_users_they_are() -> None:
    chart = next(chart for chart in pictures(analyse(sweep())) if chart.title.startswith("Speed per user"))
    picture = to_svg(chart)
    assert "<title>auto, 1 user: 192.5 tokens/s in total, 192.5 per user</title>" in picture
    assert "<title>auto, 8 users: 444.4 tokens/s in total, 55." in picture
    assert isinstance(chart, LineChart) and all(series.labels == ["1", "8"] for series in chart.series)
    assert picture.count(">8</text>") == len(chart.series)


def test_pictures_are_as_wide_as_the_page() -> None:
    page = report_html(sweep())
    assert "figure svg{width:100%" in page and f"max-width:{PAGE_WIDTH}px" in page
    widths = re.findall(r"<figure><svg [^>]*viewBox=.0 0 (\d+)", page)
    assert len(widths) == page.count("<svg") and set(widths) == {str(PAGE_WIDTH)}


def test_loads_are_ordered_by_number() -> None:
    records = [
        r for users in (8, 16, 2) for name in ("plain", "ngram:2", "ngram:4") for r in [record(name, users, 9.0)]
    ]
    titles = [chart.title for chart in pictures(analyse(records)) if chart.title.startswith("Speedup over K")]
    assert titles == [f"Speedup over K (T=0, {users} users)" for users in (2, 8, 16)]


def test_without_matplotlib_the_page_says_that_it_has_no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = report_html(sweep())
    assert "<svg" not in page and "There are no pictures on this page" in page and "paceline[plot]" in page
    assert "1 user: suffix:8; 8 users and more: auto" in page
