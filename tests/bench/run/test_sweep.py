"""Sweeps: order, records, resuming after a kill, and servers that die."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.bench.claims import never_slower
from paceline.bench.run.backend import Sampling
from paceline.bench.run.grid import Grid, Setting, parse_setting
from paceline.bench.run.load import Load
from paceline.bench.run.results import RecordFile, read_records
from paceline.bench.run.side_by_side import WARM_UP_REQUESTS
from paceline.bench.run.sweep import BackendLostError, RunOptions, run_sweep
from paceline.bench.workloads.workload import load_workload
from paceline.errors import InvalidOptionError
from tests.bench.toy_llm import FakeBackend


def grid(**changes: object) -> Grid:
    options: dict[str, object] = {
        "settings": [parse_setting("plain"), parse_setting("ngram:2"), parse_setting("ngram:4")],
        "workloads": ["chat"],
        "temperatures": [0.0],
        "loads": [Load(concurrency=2)],
        "num_repeats": 2,
        "sampling": Sampling(max_tokens=4),
        "num_requests": 4,
    }
    return Grid(**(options | changes))  # type: ignore[arg-type]


def test_a_run_has_requests_enough_for_its_users() -> None:
    counted = grid(num_requests=None)
    assert [counted.requests_of(Load(concurrency=users)) for users in (1, 2, 16)] == [4, 4, 32]
    assert counted.requests_of(Load(rate_per_s=3.0)) == 16
    longer = grid(num_requests=None, requests_for=never_slower.requests_for)
    assert [longer.requests_of(Load(concurrency=users)) for users in (1, 2, 4, 32)] == [16, 24, 48, 64]
    assert grid(num_requests=5).requests_of(Load(concurrency=16)) == 5


@pytest.mark.parametrize("workload", ["repetitive", "code", "chat", "random"])
def test_never_slower_asks_no_prompt_twice(workload: str) -> None:
    for users in (1, 2, 4, 8, 16, 32):
        num_before, num_after = max(users, WARM_UP_REQUESTS), users
        assert num_before + never_slower.requests_for(users) + num_after <= len(load_workload(workload))


def test_every_cell_once_and_the_order_rotates(tmp_path: Path) -> None:
    said: list[str] = []
    records = RecordFile(tmp_path / "runs.jsonl")
    run_sweep(grid(), lambda setting: FakeBackend(), records, RunOptions(), said.append)
    order = [(record["cell"]["setting"], record["cell"]["repeat"]) for record in records.records]
    assert len(set(order)) == 6
    assert [name for name, repeat in order if repeat == 0] != [name for name, repeat in order if repeat == 1]
    for record in records.records:
        assert record["status"] == "ok"
        assert record["summary"]["num_output_tokens"] == 16
        assert record["summary"]["engine"]["num_passes"] == 40  # of the run, without the warm-up
        assert {"commit", "versions", "machine", "time"} <= set(record["provenance"])
    assert "[6/6]" in said[-1]


def test_a_rerun_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    run_sweep(grid(num_repeats=1), lambda setting: FakeBackend(), RecordFile(path), RunOptions(), lambda line: None)
    made: list[str] = []

    def make(setting: Setting) -> FakeBackend:
        made.append(setting.name)
        return FakeBackend()

    run_sweep(grid(), make, RecordFile(path), RunOptions(), lambda line: None)
    assert sorted(made) == ["ngram:2", "ngram:4", "plain"]  # the second repeat only
    assert len(read_records([path])) == 6


def test_a_line_cut_off_in_the_middle_is_dropped_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    run_sweep(grid(num_repeats=1), lambda setting: FakeBackend(), RecordFile(path), RunOptions(), lambda line: None)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    records = RecordFile(path)
    assert len(records.records) == 2
    run_sweep(grid(num_repeats=1), lambda setting: FakeBackend(), records, RunOptions(), lambda line: None)
    assert len(RecordFile(path).records) == 3


def test_a_broken_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('not json\n{"key": "a"}\n')
    with pytest.raises(InvalidOptionError, match="line 1 is not a benchmark record"):
        RecordFile(path)


def test_a_sweep_killed_while_running_loses_no_finished_run(tmp_path: Path) -> None:
    """kill -9 in the middle of a sweep in another process; the rerun does only the rest."""
    path = tmp_path / "runs.jsonl"
    root = Path(__file__).parents[3]
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(root)!r})
        from tests.bench.run.test_sweep import grid
        from tests.bench.toy_llm import FakeBackend
        from paceline.bench.run.results import RecordFile
        from paceline.bench.run.sweep import RunOptions, run_sweep
        run_sweep(grid(num_repeats=50), lambda s: FakeBackend(0.005), RecordFile({str(path)!r}), RunOptions(), print)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        for _ in range(3):  # wait for three runs to be said
            process.stdout.readline()
        time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    before = len(RecordFile(path).records)
    assert 3 <= before < 150
    records = RecordFile(path)
    run_sweep(grid(), lambda setting: FakeBackend(), records, RunOptions(), lambda line: None)
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert len(keys) == len(set(keys)) >= 6


def test_a_server_that_dies_is_reported_and_not_averaged(tmp_path: Path) -> None:
    """The second run loses half of its requests, the third all of them."""
    runs = iter([FakeBackend(), FakeBackend(dies_after=4), FakeBackend(dies_after=0)])
    made: list[FakeBackend] = []

    def make(setting: Setting) -> FakeBackend:
        made.append(next(runs))
        return made[-1]

    records = RecordFile(tmp_path / "runs.jsonl")
    with pytest.raises(BackendLostError, match=r"got no answer at all.*2 runs before it are safe"):
        run_sweep(grid(), make, records, RunOptions(), lambda line: None)
    assert [record["status"] for record in records.records] == ["ok", "failed", "failed"]
    assert "2 of 4 requests failed: ConnectionRefusedError: gone" in records.records[1]["error"]
    assert records.records[1]["summary"]["num_output_tokens"] == 8
    assert all(backend.closed for backend in made)
    # the failed cells are measured again by the next run
    run_sweep(grid(), lambda setting: FakeBackend(), records, RunOptions(), lambda line: None)
    assert len(records.done()) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": []}, "at least a setting"),
        ({"loads": []}, "at least a load"),
        ({"workloads": ["nothing"]}, "unknown workload"),
        ({"temperatures": [-1.0]}, "between 0 and 100"),
        ({"num_repeats": 0}, "1 or more"),
        ({"settings": [parse_setting("plain"), parse_setting("plain")]}, "twice"),
        ({"settings": [parse_setting("plain"), parse_setting("a=http://localhost:1")]}, "not both"),
    ],
)
def test_an_impossible_grid_says_so_before_the_first_run(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        grid(**changes).check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngrams:4", "unknown key 'ngrams'.*Did you mean 'ngram'"),
        ("ngram:0", "num_speculative_tokens must be"),
        ("ngram:four", "cannot read the setting"),
        ('{"method": "ngram", "K": 3}', "unknown key 'K'"),
        ('{"method": ', "not JSON"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        parse_setting(text)


def test_settings_are_parsed_into_configurations() -> None:
    assert parse_setting("suffix:8x32").config == {"method": "suffix", "num_speculative_tokens": 8, "node_budget": 32}
    assert parse_setting("plain").config == {"method": "none"}
    assert parse_setting("v=http://h:1").url == "http://h:1"
