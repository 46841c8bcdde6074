"""`paceline tune tree RECORDING`: a table, a configuration to use, and errors that say what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.replay.recording import save_recording
from paceline.cli.config_file import read_config
from paceline.cli.main import main
from paceline.spec.config.speculative_config import SpeculativeConfig
from tests.bench.made_up import recording


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    save_recording(recording(0.8, num_tokens=120), tmp_path / "recording.jsonl")
    return str(tmp_path / "recording.jsonl")


@pytest.fixture
def curve(tmp_path: Path) -> str:
    (tmp_path / "curve.json").write_text('{"1": 0.1, "16": 0.11}')
    return str(tmp_path / "curve.json")


def tune(*arguments: str) -> int:
    return main(["tune", "tree", *arguments])


def test_it_prints_the_table_and_writes_a_configuration(
    recorded: str, curve: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(recorded, "--curve", curve, "--nodes", "2", "6") == 0
    out = capsys.readouterr().out
    assert "chances from 2 requests, judged on 2 others" in out
    header = next(line for line in out.splitlines() if line.startswith("nodes"))
    assert "replayed speedup" in header and "nodes by depth" in header
    config = json.loads(out.rsplit("--speculative-config '", 1)[1].rstrip("'\n"))
    assert config["method"] == "recycling" and config["node_budget"] >= 6
    assert SpeculativeConfig.parse(config) is not None


def test_without_a_curve_it_says_why_the_largest_wins(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(recorded, "--method", '{"method": "suffix", "suffix_decoding_max_spec_factor": 8}', "--nodes", "4") == 0
    out = capsys.readouterr().out
    assert "paceline bench curve" in out and "speedup" not in out
    assert '"suffix_decoding_max_spec_factor": 8' in out


def test_no_tree_is_recommended_where_rows_are_expensive(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "expensive.json").write_text('{"1": 0.1, "2": 0.9}')
    assert tune(recorded, "--method", "ngram", "--curve", str(tmp_path / "expensive.json"), "--nodes", "2") == 0
    assert "no tree pays" in capsys.readouterr().out


def test_json_holds_the_trees(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(recorded, "--nodes", "3", "6", "--max-depth", "3", "--json") == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [choice["nodes"] for choice in record["choices"]] == [3, 6]
    for choice in record["choices"]:
        assert len(choice["parents"]) == len(choice["ranks"]) == choice["nodes"]
        assert choice["replayed_tokens_per_pass"] > 1.0 and choice["expected_tokens_per_pass"] > 1.0
    assert len(record["acceptance_by_depth_and_rank"]) == 3
    assert record["speculative_config"]["num_speculative_tokens"] <= 3


def test_the_file_is_one_that_serve_takes(recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tuned.json"
    assert tune(recorded, "--method", "merge", "--nodes", "8", "--out", str(out)) == 0
    assert f"paceline serve --config {out}" in capsys.readouterr().out
    config = read_config(str(out), {"speculative_config": None})["speculative_config"]
    parsed = SpeculativeConfig.parse(config)
    assert parsed is not None and (parsed.method, parsed.node_budget) == ("merge", 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such.jsonl"], "no-such.jsonl is not a recording (make one with `paceline bench record`)"),
        (["RECORDING", "--method", "eagle3"], "not of 'eagle3'"),
        (["RECORDING", "--method", "{3"], "neither a name nor JSON"),
        (["RECORDING", "--nodes", "0"], "1 to 512 nodes"),
        (["RECORDING", "--max-depth", "0"], "--max-depth must be at least 1"),
        (["RECORDING", "--curve", "no-such.json"], "no-such.json is not a pass cost"),
        (["RECORDING", "--data", "prompts.jsonl"], "the prompts are in the recording"),
        (["RECORDING", "--max-nodes", "8"], "--nodes gives the sizes"),
        (["--method", "suffix"], "--method needs a recording"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(
    arguments: list[str], says: str, recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*[recorded if word == "RECORDING" else word for word in arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "holds no answers"), ("[1]\n", "not a recording"), ('{"a": 1}\n', "not a recording"), ("x", "not a record")],
)
def test_a_file_that_is_no_recording_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    assert tune(str(tmp_path / "r.jsonl")) == 2
    assert says in capsys.readouterr().err
