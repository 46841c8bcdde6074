"""`paceline lab`: tables for people, JSON for machines, plots for both."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import lab
from paceline.errors import InvalidOptionError


def call(*words: str) -> None:
    parser = argparse.ArgumentParser()
    lab.add_arguments(parser)
    assert lab.run(parser.parse_args(words)) == 0


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    call(*words, "--json")
    result: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return result


def test_expected_table_agrees_with_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "expected")
    assert len(table) == 12
    assert all(abs(row["formula"] - row["simulator"]) <= 2.5 * row["+-"] for row in table)


def test_speedup_recommends_plain_decoding_where_nothing_pays(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "speedup", "--acceptance", "0.05", "0.9", "--draft-ms", "2", "--target-ms", "10")
    assert [row["advice"] == "turn it off" for row in table] == [True, False]


def test_accept_takes_both_distributions_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "accept", "--target", "1", "3", "--draft", "3", "1", "--trials", "20000")
    assert table[0]["sum min(p,q)"] == pytest.approx(0.5)
    with pytest.raises(InvalidOptionError, match="belong together"):
        call("accept", "--target", "1", "3")


def test_cost_falls_with_the_speedup(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, "cost", "--dollars-per-hour", "3.6", "--tokens-per-s", "1000", "--speedup", "1", "2")
    assert [row["$ per million tokens"] for row in table] == pytest.approx([1.0, 0.5])


def test_a_plot_is_written_beside_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call("speedup", "--plot", str(tmp_path / "speedup.svg"))
    assert "break-even acceptance" in capsys.readouterr().out
    assert "Speedup over plain decoding" in (tmp_path / "speedup.svg").read_text()
