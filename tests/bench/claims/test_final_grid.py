"""The final grid's verdicts: whole intervals below the bar fail, and means are taken over cells."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.analyse.cells import Point
from paceline.bench.claims.final_grid import Ratio, Verdict, means, requests_for
from paceline.cli.main import main


def test_a_cell_fails_only_where_its_whole_interval_is_below_the_bar() -> None:
    noisy, clear = Ratio.of([0.90, 0.96, 1.0]), Ratio.of([0.95, 0.951, 0.952])
    assert noisy.low < noisy.mean < 0.97 < noisy.high and clear.high < 0.97
    point = Point("chat", 0.0, 1)
    assert Verdict("warm", point, noisy, 3, None, None).holds and not Verdict("warm", point, clear, 3, None, None).holds
    assert Verdict("cold", point, Ratio.of([0.5]), 1, None, None).holds  # one round says nothing about its interval


def test_means_are_geometric_and_each_group_has_its_bar() -> None:
    found = [
        Verdict(state, Point(workload, 0.0, users), Ratio(value, 0.9 * value, 1.1 * value), 3, "suffix:4", 0.96)
        for state, users, workload, value in [
            ("warm", 1, "chat", 2.0),
            ("warm", 1, "code", 0.5),
            ("warm", 8, "chat", 0.99),
            ("cold", 1, "chat", 1.01),
        ]
    ]
    rows = {(row["state"], row["users"]): row for row in means(found)}
    assert rows["warm", "1"]["auto / plain"] == 1.0 and rows["warm", "1"]["holds"] == "yes"
    assert rows["warm", "8"]["holds"] == "NO" and rows["cold", "1"]["holds"] == "yes"
    assert rows["warm", "all"]["at least"] > 1.0 and rows["warm", "all"]["holds"] == "NO"


def test_every_engine_gets_a_few_seconds_of_work() -> None:
    assert [requests_for(users) for users in (1, 2, 4, 8, 16, 32)] == [8, 12, 24, 48, 48, 64]


def test_the_command_writes_its_table_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.bench.run import side_by_side

    calls: list[tuple[str, int]] = []

    def measure(grid: Any, cells: Any, make_engine: Any, options: Any) -> Any:
        for cell in cells:
            calls.append((cell.setting.name, cell.repeat))
            summary = {"tokens_per_s": 120.0 if cell.setting.name == "auto" else 100.0, "num_failed": 0}
            summary |= {"tokens_per_s_per_user": 1.0, "speculation": {}}
            yield side_by_side.record_of(grid, cell, [], summary, {})

    monkeypatch.setattr(side_by_side, "_measure", measure)
    monkeypatch.setattr(side_by_side, "line_of", lambda record: "")
    out = tmp_path / "grid"
    arguments = [
        "bench",
        "final-grid",
        "--out",
        str(out),
        "--workload",
        "chat",
        "--temperature",
        "0",
        "--concurrency",
        "1",
    ]
    code = main([*arguments, "--fixed", "suffix:4"])
    found = json.loads((tmp_path / "grid.json").read_text())
    assert code == 0 and [row["state"] for row in found["rows"]] == ["warm", "cold"]
    assert found["rows"][0]["auto / plain"] == 1.2 and found["rows"][0]["rounds"] == 3
    assert sorted(set(calls)) == [
        ("auto", 0),
        ("auto", 1),
        ("auto", 2),
        ("plain", 0),
        ("plain", 1),
        ("plain", 2),
        ("suffix:4", 0),
    ]
    num_calls = len(calls)
    assert main([*arguments, "--fixed", "suffix:4"]) == 0 and len(calls) == num_calls
    capsys.readouterr()
    other = ["--out", str(tmp_path / "other"), "--concurrency", "2"]  # another lane, and both joined
    assert main([*arguments, *other, "--fixed"]) == 0
    num_calls = len(calls)
    lanes = [str(out), str(tmp_path / "other")]
    assert main(["bench", "final-grid", "--out", str(tmp_path / "joined"), "--join", *lanes]) == 0
    joined = json.loads((tmp_path / "joined.json").read_text())["rows"]
    assert [row["users"] for row in joined] == [1, 2, 1, 2] and len(calls) == num_calls
    assert joined[0] == found["rows"][0]
    capsys.readouterr()
