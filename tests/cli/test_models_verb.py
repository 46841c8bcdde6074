"""`paceline models` says what there is, in a table and in JSON, without loading anything heavy."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import models


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return models.run(parser.parse_args(arguments))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path


def test_before_the_first_fetch_no_model_is_shown_as_cached(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert "smollm2-135m (default)" in out and "fetched on first use" in out and "93 MB" in out
    assert run("--json") == 0
    described = json.loads(capsys.readouterr().out)
    assert described["cache"] == str(cache)
    assert described["models"][0]["cached"] is False and described["models"][0]["path"] is None


def test_a_fetched_model_is_shown_as_cached(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cache / "smollm2-135m-v1"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(b"x" * 3_000_000)
    run()
    out = capsys.readouterr().out
    assert "cached" in out and str(folder) in out and "3 MB" in out
    run("--json")
    model = json.loads(capsys.readouterr().out)["models"][0]
    assert (model["cached"], model["size_bytes"], model["path"]) == (True, 3_000_002, str(folder))


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys, argparse; from paceline.cli import models; models.run(argparse.Namespace(json=True)); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
