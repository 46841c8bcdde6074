"""`paceline tune` on the real model, as small as it can be: answers, stores, refuses."""

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.spec.model.layer_search import load_stored


def test_layers_are_searched_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    arguments = ["--prompts", "1", "--tokens", "6", "--evaluations", "7", "--output", str(path), "--json"]
    assert main(["tune", "layer-skip", *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["draft_layers"] == load_stored(path)
    assert 0 < len(record["draft_layers"]) < 30
    assert 0.0 <= record["agreement"] <= 1.0 and record["num_speculative_tokens"] >= 1


def test_a_tree_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "tree", "--prompts", "1", "--tokens", "12", "--max-nodes", "8", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["parents"]) == len(record["ranks"]) <= 8
    assert record["estimated_speedup"] >= 0.99  # nothing at all is an answer too
    assert main(["tune", "tree", "--prompts", "1", "--tokens", "12"]) == 0
    assert "a pass takes" in capsys.readouterr().out


def test_malformed_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "layer-skip", "--evaluations", "0"]) == 2
    assert "--evaluations must be at least 1" in capsys.readouterr().err
    assert main(["tune", "tree", "--prompts", "1", "--data", "no-such-file.jsonl"]) == 2
    assert "no-such-file.jsonl" in capsys.readouterr().err
