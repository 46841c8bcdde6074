"""Our engine behind the bench's seam, and the bench's commands from end to end on records."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.claims.expected_tokens import _standard_error
from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.curve import measure_curve
from paceline.bench.run.engine_backend import EngineBackend
from paceline.bench.run.load import Load, offer
from paceline.bench.run.summary import summarize
from paceline.bench.workloads.workload import Prompt
from paceline.cli import bench
from paceline.errors import InvalidOptionError, MissingExtraError
from paceline.llm import AsyncLLM
from tests.bench.analyse.test_report import sweep
from tests.bench.toy_llm import toy_model

LIMITS: dict[str, Any] = {"num_kv_blocks": 128, "block_size": 4, "max_num_batched_tokens": 64}
PROMPTS = [Prompt(str(i), "toy", text, chat=False) for i, text in enumerate(["abcabcab", "hello", "qrqrqr", "mmm"])]


def answers_of(config: dict[str, Any]) -> tuple[list[Answer], dict[str, float]]:
    backend = EngineBackend(AsyncLLM(toy_model(6.0), config, **LIMITS), config, "toy")
    try:
        sampling = Sampling(max_tokens=20, temperature=1.0, seed=5)
        return asyncio.run(offer(backend, PROMPTS, sampling, Load(concurrency=2))), backend.figures()
    finally:
        backend.close()


def test_all_settings_give_the_same_text_and_count_their_own_work() -> None:
    plain, _ = answers_of({"method": "none"})
    drafted, figures = answers_of({"method": "suffix", "node_budget": 16})
    assert [a.output_hash for a in drafted] == [a.output_hash for a in plain]
    assert all(a.error is None and a.num_output_tokens == 20 for a in plain)
    summary = summarize(drafted, figures=figures)
    assert summary["speculation"]["num_draft_tokens"] > 0
    assert summary["engine"]["num_passes"] > 0 and summary["engine"]["execute_s"] > 0


def test_a_request_that_cannot_be_served_is_an_error_not_a_time() -> None:
    backend = EngineBackend(AsyncLLM(toy_model(), {"method": "none"}, **LIMITS), None, "toy")
    try:
        answer = asyncio.run(backend.generate(Prompt("x", "toy", "", chat=False), Sampling(), 0))
    finally:
        backend.close()
    assert answer.error is not None and "prompt is empty" in answer.error


def test_the_curve_times_steps_of_exactly_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    seen: set[int] = set()
    forward = model.decoder.forward

    def watched(batch: Any, *args: Any, **options: Any) -> Any:
        seen.add(batch.num_rows)
        return forward(batch, *args, **options)

    monkeypatch.setattr(model.decoder, "forward", watched)
    monkeypatch.setattr("paceline.bench.run.curve.PROMPT", "abc")
    curve = measure_curve(model, [1, 5], num_tokens=10, num_rounds=1, context=3, **LIMITS)
    assert curve.rows == (1.0, 5.0) and {1, 5} <= seen
    with pytest.raises(InvalidOptionError, match="1 row or more"):
        measure_curve(model, [0], **LIMITS)


def test_the_oracles_error_bar_is_that_of_a_coin_flip_for_one_draft_token() -> None:
    """K = 1 is a coin flip: variance a (1 - a)."""
    assert _standard_error(0.8, 1, 100) == pytest.approx((0.8 * 0.2 / 100) ** 0.5)


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


def test_report_writes_a_page_and_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs.jsonl"
    runs.write_text("".join(json.dumps(record) + "\n" for record in sweep()))
    page, config = tmp_path / "report.html", tmp_path / "config.json"
    assert call("report", str(runs), "--out", str(page), "--config-out", str(config)) == 0
    assert "suffix:8 has the best mean speedup" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(config.read_text())["speculative_config"]["method"] == "suffix"
    assert call("report", str(runs), "--out", str(page)) == 0  # without a name it lies beside the page
    assert (tmp_path / "report.config.json").read_text() == config.read_text()
    assert call("report", str(runs), "--out", str(page), "--config-out", str(config), "--users", "8") == 0
    assert json.loads(config.read_text())["speculative_config"] == {"method": "auto"}
    assert "1 user: suffix:8; 8 users and more: auto" in capsys.readouterr().out
    with pytest.raises(InvalidOptionError, match="no records at"):
        call("report", str(tmp_path / "missing.jsonl"))


def test_a_sweep_over_servers_writes_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options of the fastest server are not known, and a file without them would mean `auto`."""
    records = [record | {"cell": record["cell"] | {"speculative_config": None}} for record in sweep()]
    runs, page = tmp_path / "runs.jsonl", tmp_path / "report.html"
    runs.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert call("report", str(runs), "--out", str(page)) == 0
    assert "own options are not known here" in (said := capsys.readouterr().out) and "no options file" in said
    assert call("report", str(runs), "--out", str(page), "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"] is None
    assert not (tmp_path / "report.config.json").exists() and "null" not in page.read_text().split("Pictures")[0]


def test_predict_prints_a_row_per_cell_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, curve = tmp_path / "runs.jsonl", tmp_path / "curve.json"
    runs.write_text("".join(json.dumps(record) + "\n" for record in sweep()))
    curve.write_text(json.dumps({"1": 0.010, "5": 0.014, "8": 0.020, "40": 0.080}))
    code = call("predict", str(runs), "--curve", str(curve), "--plot", str(tmp_path / "p.svg"), "--json")
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["share_within_tolerance"]["predicts"] >= 0.9 else 1)
    assert len(result["rows"]) == 6 and (tmp_path / "p.svg").exists()
    assert [row["setting"] for row in result["errors"]] == ["all", "ngram:4", "suffix:8", "auto"]


def test_predict_says_where_it_only_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, curve = tmp_path / "runs.jsonl", tmp_path / "curve.json"
    one_load = [record for record in sweep() if record["cell"]["concurrency"] == 1]
    runs.write_text("".join(json.dumps(record) + "\n" for record in one_load))
    curve.write_text(json.dumps({"1": 0.010, "5": 0.014, "8": 0.020, "40": 0.080}))
    code = call("predict", str(runs), "--curve", str(curve))
    said = capsys.readouterr().out
    shares = json.loads(said.splitlines()[-1])["share_within_tolerance"]
    assert "only explained" in said and shares["predicts"] is None
    assert code == (0 if shares["explains"] >= 0.9 else 1)


def test_a_grid_that_cannot_be_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(InvalidOptionError, match="unknown workload"):
        call("sweep", "--workload", "nothing", "--model", "/nowhere")
    with pytest.raises(InvalidOptionError, match="concurrency must be 1 or more"):
        call("run", "--concurrency", "-1", "--model", "/nowhere")


def test_a_plot_that_cannot_be_drawn_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionError, match=r"\.svg or \.png"):
        call("never-slower", "--model", "/nowhere", "--plot", "picture.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"paceline\[plot\]"):
        call("curve", "--model", "/nowhere", "--plot", "picture.svg")


def test_claims_write_tables_for_the_docs(tmp_path: Path) -> None:
    runs, curve, page = tmp_path / "runs.jsonl", tmp_path / "curve.json", tmp_path / "table.md"
    runs.write_text("".join(json.dumps(record) + "\n" for record in sweep()))
    curve.write_text(json.dumps({"1": 0.010, "5": 0.014, "8": 0.020, "40": 0.080}))
    call("predict", str(runs), "--curve", str(curve), "--markdown", str(page))
    tables = [table.splitlines() for table in page.read_text().split("\n\n")]
    assert len(tables) == 2  # errors by setting, then cells
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1 and set(lines[1]) == {"|", " ", "-"}
        assert len(lines) > 3
