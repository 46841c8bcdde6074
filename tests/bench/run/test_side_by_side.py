"""Engines in turns: each has a clock of its own, its batch stays full, and all give the same answers."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.backend import Sampling
from paceline.bench.run.grid import Grid, Setting, parse_setting
from paceline.bench.run.lane import Lane, length_of, run_lanes
from paceline.bench.run.load import Load
from paceline.bench.run.results import RecordFile
from paceline.bench.run.side_by_side import LEARNED_CACHE, MakeEngine, run_side_by_side
from paceline.bench.run.sweep import RunOptions
from paceline.bench.workloads.workload import Prompt
from paceline.errors import InvalidOptionError
from paceline.llm import LLM
from tests.bench.toy_llm import toy_model

LIMITS: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 4, "max_num_batched_tokens": 256}
PROMPTS = [Prompt(str(i), "toy", text, chat=False) for i, text in enumerate(["abcabcab", "hello", "qrqrqr", "mmm"])]
OTHERS = [Prompt("other", "toy", "edededed", chat=False)]


def make(setting: Setting) -> LLM:
    return LLM(toy_model(6.0), setting.config, **LIMITS)


def measure(
    folder: Path, settings: list[str], lines: list[str], cold: Sequence[str] = (), make: MakeEngine = make
) -> RecordFile:
    workload = folder / "prompts.jsonl"
    workload.write_text("".join(f'{{"prompt": "{prompt.text}"}}\n' for prompt in [*PROMPTS, *OTHERS]))
    sampling = Sampling(max_tokens=12)
    grid = Grid([parse_setting(s) for s in settings], [str(workload)], [1.0], [Load(concurrency=2)], 1, sampling)
    grid = replace(grid, cold_settings=[parse_setting(s) for s in cold])
    records = RecordFile(folder / "runs.jsonl")
    run_side_by_side(grid, make, records, RunOptions(num_warm_up=1), lines.append)
    return records


def test_all_settings_give_the_same_answers_and_a_rerun_measures_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    records = measure(tmp_path, ["plain", "suffix:4", "auto"], lines).records
    assert [record["cell"]["setting"] for record in records] == ["plain", "suffix:4", "auto"]
    assert {record["status"] for record in records} == {"ok"}
    hashes = [[request["output_hash"] for request in record["requests"]] for record in records]
    assert hashes[0] == hashes[1] == hashes[2] and all(hashes[0])
    for record in records:
        summary = record["summary"]
        assert summary["tokens_per_s"] == pytest.approx(summary["num_output_tokens"] / summary["wall_s"])
        assert summary["num_output_tokens"] >= 4 * 12  # those of users who had nothing left to ask count as well
        assert summary["engine"]["num_passes"] > 0
    assert records[0]["summary"]["speculation"]["mean_acceptance_length"] == 1.0
    assert "[1/1]" in lines[-1]
    again: list[str] = []
    assert len(measure(tmp_path, ["plain", "suffix:4", "auto"], again).records) == 3
    assert "recorded" in again[0] and len(again) == 1


def test_a_cold_engine_is_new_and_its_first_step_counts(tmp_path: Path) -> None:
    """Warm and cold beside each other: what an engine's first step takes is in the cold figures alone."""
    made: list[LLM] = []
    learned = []

    def slow_to_begin(setting: Setting) -> LLM:
        llm = make(setting)
        first_step = llm.step

        def step() -> None:
            if not llm.stats()["num_steps"]:
                learned.append(os.environ.get(LEARNED_CACHE))
                time.sleep(0.5)
            first_step()

        monkeypatch.setattr(llm, "step", step)
        made.append(llm)
        learned.append(os.environ.get(LEARNED_CACHE))
        return llm

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(LEARNED_CACHE, "/somewhere")
        settings = ["plain", "auto"]
        records = measure(tmp_path, settings, [], cold=settings, make=slow_to_begin).records
        assert os.environ[LEARNED_CACHE] == "/somewhere" and set(learned) == {"off"}
    found = {(r["cell"].get("start", "warm"), r["cell"]["setting"]): r["summary"] for r in records}
    assert len(found) == 4 and len({record["key"] for record in records}) == 4
    for setting in settings:
        cold, warm = found["cold", setting], found["warm", setting]
        assert cold["wall_s"] > 0.5 > warm["wall_s"] and cold["ttft_s"]["p99"] > 0.45
        assert cold["start_s"] > 0.0
    rehearsed, (plain, auto) = made[:4], made[4:6]
    assert len(made) == 2 * 2 + 2 * 2 and not set(map(id, rehearsed)) & {id(plain), id(auto)}
    assert found["cold", "plain"]["engine"]["num_passes"] == plain.stats()["num_steps"], "nothing came before"
    hashes = {tuple(request["output_hash"] for request in record["requests"]) for record in records}
    assert len(hashes) == 1


def test_tokens_are_counted_by_the_second_of_the_engines_own_clock() -> None:
    lane = Lane(make(parse_setting("plain")))
    lane.offer(PROMPTS, OTHERS, Sampling(max_tokens=10), 2)
    emitted, step = [], lane.llm.step

    def slow() -> None:
        emitted.append(lane.num_emitted)
        time.sleep(0.15)
        step()

    lane.llm.step = slow  # type: ignore[method-assign]
    time.sleep(0.5)  # elsewhere
    run_lanes([lane])
    assert len(lane.emitted_by_second) == int(lane.spent_s - lane.began_s)
    assert lane.emitted_by_second[0] == emitted[6], "the step that crosses the end of the second came after it"


def test_taking_in_a_question_is_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(make(parse_setting("plain")))
    submit = lane.llm.submit

    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return submit(*given)

    monkeypatch.setattr(lane.llm, "submit", slow)
    lane.offer(PROMPTS, OTHERS, Sampling(max_tokens=2), 2)
    assert lane.spent_s - lane.began_s >= 0.1


def test_a_slow_engine_takes_no_time_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Lane(make(parse_setting("plain"))), Lane(make(parse_setting("plain")))
    step, turns = slow.llm.step, []

    def late() -> None:
        turns.append(quick.num_emitted)
        time.sleep(0.02)
        step()

    monkeypatch.setattr(slow.llm, "step", late)
    for lane in (slow, quick):
        lane.offer(PROMPTS, OTHERS, Sampling(max_tokens=10), 2)
    run_lanes([slow, quick])
    assert not slow.is_busy and not quick.is_busy
    assert slow.spent_s >= 0.02 * len(turns) and quick.spent_s < slow.spent_s / 2
    assert turns[1] > 0, "the quick one made steps between the first two of the slow one"
    lengths = [length_of(index, 10) for index in range(len(PROMPTS))]
    assert [answer.num_output_tokens for answer in quick.answers] == lengths
    assert all(len(answer.event_s) == answer.num_output_tokens for answer in quick.answers)


def test_answers_differ_in_length_but_not_on_average() -> None:
    lengths = [length_of(index, 64) for index in range(32)]
    assert 32 <= min(lengths) < 40 and 88 < max(lengths) <= 96
    assert abs(sum(lengths) / 32 - 64) < 3 and length_of(0, 1) == 1


def test_a_question_that_cannot_be_asked_is_an_error_of_its_own() -> None:
    lane = Lane(make(parse_setting("plain")))
    lane.offer([Prompt("empty", "toy", "", chat=False), *PROMPTS], OTHERS, Sampling(max_tokens=4), 2)
    run_lanes([lane])
    assert lane.answers[0].error is not None and "empty" in lane.answers[0].error
    assert all(answer.error is None for answer in lane.answers[1:])


def test_servers_and_rates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="sweep"):
        measure(tmp_path, ["plain=http://localhost:1", "auto=http://localhost:2"], [])


def test_a_setting_that_cannot_be_built_is_recorded_as_failed(tmp_path: Path) -> None:
    records = measure(tmp_path, ["plain", "eagle3"], []).records
    assert [record["status"] for record in records] == ["ok", "failed"]
    assert records[1]["error"]
