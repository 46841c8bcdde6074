"""The verdict "never slower": by intervals of rounds that were fixed beforehand, and by geometric means."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.analyse.cells import analyse
from paceline.bench.analyse.intervals import median
from paceline.bench.claims.never_slower import FAILS, HOLDS, OPEN, heat_map, judge, means, verdicts, worst
from paceline.cli import bench
from paceline.errors import InvalidOptionError
from paceline.llm import LLM
from tests.bench.analyse.test_report import record
from tests.bench.toy_llm import toy_model

ROUNDS = 6


def measured(
    of_plain: dict[int, list[float]], start: str = "warm", temperature: float = 0.0, best: float = 1.0
) -> list[dict[str, Any]]:
    """users -> auto / plain in each round; the best fixed setting is `best` times as fast as plain decoding."""
    found = []
    for users, ratios in of_plain.items():
        for number, ratio in enumerate(ratios):
            drift = 100.0 * (1 + number)  # of the machine
            found += [record("plain", users, drift, number), record("auto", users, ratio * drift, number)]
            found.append(record("suffix:4", users, best * drift, number))
    for one in found:
        one["cell"]["temperature"] = temperature
        one["key"] += f"/{temperature}/{start}"
        if start == "cold":
            one["cell"]["start"] = start
    return found


def judged(of_plain: dict[int, list[float]], rounds: int = ROUNDS, **more: Any) -> list[str]:
    start = more.get("start", "warm")
    return [v.holds for v in verdicts(analyse(measured(of_plain, **more), start), rounds, start)]


def test_a_cell_fails_only_where_its_whole_interval_lies_below_the_bar() -> None:
    below, across = [0.90, 0.91, 0.92, 0.93, 0.94, 0.96], [0.90, 0.91, 0.92, 0.93, 0.94, 0.98]
    assert judged({1: below, 2: across, 4: [1.0] * 6}) == [FAILS, HOLDS, HOLDS]


def test_too_few_rounds_decide_nothing_and_the_table_says_what_they_cover() -> None:
    assert judged({1: [1.5] * 5, 2: [0.5] * 5}, rounds=5) == [OPEN, OPEN]
    (verdict,) = verdicts(analyse(measured({1: [1.5] * 2})), 2)
    assert verdict.row()["covers"] == "50%" and verdict.row()["rounds"] == "2 of 2"
    assert judge(median([1.5]), 0.97, 1) == OPEN


def test_a_cell_without_all_its_rounds_is_open() -> None:
    assert judged({1: [1.0] * 7, 2: [1.0] * 8}, rounds=8) == [OPEN, HOLDS]


def test_the_best_fixed_setting_is_a_bar_for_warm_engines_only() -> None:
    assert judged({1: [1.0] * 6}, best=1.2) == [FAILS]
    assert judged({1: [1.0] * 6}, best=1.2, start="cold") == [HOLDS]


def test_means_have_bars_for_each_temperature_and_each_number_of_users() -> None:
    """No cell fails, but with 8 users there is a loss in all of them."""
    records = measured({1: [1.21] * 6, 8: [0.98] * 6}) + measured({1: [1.0] * 6, 8: [0.99] * 6}, temperature=1.0)
    analysis = analyse(records)
    found = verdicts(analysis, ROUNDS)
    assert worst([v.holds for v in found]) == HOLDS
    over = {mean.over: mean for mean in means(analysis, found, is_claimed_grid=True)}
    assert over["T = 0"].value == pytest.approx((1.21 * 0.98) ** 0.5) and over["T = 0"].holds == HOLDS
    assert over["T = 1"].holds == FAILS and over["8 users"].holds == FAILS and over["1 user"].holds == HOLDS
    assert over["T = 1, 8 users"].holds is None and over["T = 1, 8 users"].value == pytest.approx(0.99)
    assert over["all cells"].bar == 1.18 and over["all cells"].holds == FAILS
    assert {mean.bar for mean in means(analysis, found, is_claimed_grid=False) if mean.over == "all cells"} == {None}


def test_a_mean_shows_its_single_rounds() -> None:
    analysis = analyse(measured({1: [1.0, 1.2], 2: [0.9, 1.2]}))
    (mean, *_) = means(analysis, verdicts(analysis, 2), is_claimed_grid=False)
    assert mean.rounds is not None
    assert (mean.rounds.low, mean.rounds.high) == (pytest.approx(0.9**0.5), pytest.approx(1.2))


def test_cold_and_warm_runs_of_one_file_are_told_apart() -> None:
    records = measured({1: [1.3] * 2}) + measured({1: [0.8] * 2}, start="cold")
    values = {start: verdicts(analyse(records, start), 2, start)[0] for start in ("warm", "cold")}
    assert {start: v.of_plain.value for start, v in values.items()} == pytest.approx({"warm": 1.3, "cold": 0.8})
    assert analyse(records).cells == analyse(records, "warm").cells
    assert heat_map(list(values.values())).rows == ["cold chat, T=0", "warm chat, T=0"]


def test_the_first_seconds_are_shown_apart() -> None:
    records = measured({1: [1.0]})
    for one in records:
        slow_start = [50, 110, 230] if one["cell"]["setting"] == "auto" else [100, 200, 300]
        one["summary"]["tokens_by_second"] = slow_start
    (verdict,) = verdicts(analyse(records))
    assert verdict.early == pytest.approx(110 / 200)


def run_command(folder: Path, *more: str) -> int:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("abcabcab", "hello", "qrqrqr", "mmm")))
    given = ["--workload", str(prompts), "--temperature", "1", "--concurrency", "2", "--requests", "2"]
    given += ["--max-tokens", "6", "--setting", "plain", "auto", "suffix:4", "--out", str(folder / "runs.jsonl")]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["never-slower", *given, *more]))


@pytest.fixture
def toy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 4, "max_num_batched_tokens": 256}
    monkeypatch.setattr(
        bench, "engine_maker", lambda args: lambda setting: LLM(toy_model(6.0), setting.config, **limits)
    )


@pytest.mark.usefixtures("toy_engines")
def test_the_command_measures_both_starts_and_says_that_two_rounds_decide_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert run_command(tmp_path, "--start", "both", "--repeats", "2", "--markdown", str(page)) == 1
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert [row["start"] for row in result["rows"]] == ["cold", "warm"] and result["rounds"] == 2
    assert {row["holds"] for row in result["rows"]} == {"open"} and result["claim"] in ("open", "fails")
    assert set(result["start_up_s"]) == {"plain", "auto", "suffix:4"}
    assert "4 points in 2 rounds: about" in said.err and "[4/4]" in said.err
    assert page.read_text().count("\n| --- |") == 3 and "The claim " in page.read_text()
    settings = [json.loads(line)["cell"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert sorted(cell["setting"] for cell in settings if cell.get("start") == "cold") == ["auto"] * 2 + ["plain"] * 2


@pytest.mark.usefixtures("toy_engines")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--repeats", "2"], "repeats was 1, now 2"),
        (["--repeats", "1", "--concurrency", "1"], "concurrency was"),
        (["--repeats", "1", "--start", "both"], "start was 'cold', now 'both'"),
    ],
)
def test_a_plan_cannot_change_once_something_is_measured(tmp_path: Path, change: list[str], said: str) -> None:
    run_command(tmp_path, "--start", "cold", "--repeats", "1")
    before = (tmp_path / "runs.jsonl").read_bytes()
    run_command(tmp_path, "--start", "cold", "--repeats", "1")  # as it was begun: nothing is left to do
    given = change if "--start" in change else ["--start", "cold", *change]
    with pytest.raises(InvalidOptionError, match=said):
        run_command(tmp_path, *given)
    assert (tmp_path / "runs.jsonl").read_bytes() == before
