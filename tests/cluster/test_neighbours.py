"""Simulated workers of one host: how they slow each other down."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.simulate.figures import Outcome
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.stretch import Stretch
from paceline.cluster.simulate.trace import Synthetic, Trace, TraceRequest
from paceline.cluster.worker_spec import Slowdown, WorkerSpec
from paceline.errors import InvalidOptionError
from tests.cluster.specs import spec

# A pass of n rows takes 9 + n ms (tests/cluster/specs.py).
TWICE = Slowdown(2.0, 2.0, 2.0, 2.0)


def run(slowdown: Slowdown | None, *requests: TraceRequest, workers: int = 2) -> Outcome:
    """On two workers, in turns."""
    return simulate(Trace(requests, 16), Fleet(spec(slowdown=slowdown), workers), "round_robin")


def test_alone_on_its_host_a_worker_is_as_fast_as_without_a_table() -> None:
    trace = Synthetic(requests=200, rate=6, prompt=100, output=20).trace()
    plain, alone = (simulate(trace, Fleet(spec(slowdown=table, max_token_delay_s=0.02), 1)) for table in (None, TWICE))
    assert (plain.e2e_s == alone.e2e_s).all() and (plain.ttft_s == alone.ttft_s).all()
    assert plain.gaps.percentile(99) == alone.gaps.percentile(99)


def test_a_pass_that_runs_slows_down_when_a_neighbour_begins_and_not_only_the_next_one() -> None:
    """The second stream runs for 220 ms at half of the speed, in which the first one gets on by 110 ms of its work."""
    requests = TraceRequest(0.0, 1, 101), TraceRequest(0.2051, 1, 11)
    assert run(None, *requests).e2e_s.tolist() == pytest.approx([1.010, 0.110])
    beside = run(TWICE, *requests)
    assert beside.e2e_s.tolist() == pytest.approx([1.010 + 0.110, 0.220])
    assert beside.gaps.percentile(100) == pytest.approx(0.020, rel=0.02)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_neighbour_that_is_busy_for_a_part_of_the_time_slows_down_by_that_part(share: float) -> None:
    """The neighbour has a pass of 10 ms of work, 15 ms beside this stream, every 15 ms / share. Every other request
    goes to the stream's worker and waits for its only seat."""
    times = [0.001 + i * 0.015 / share for i in range(2000) for _ in "12"]
    trace = Trace([TraceRequest(0.0, 1, 2001), *(TraceRequest(at_s, 1, 1) for at_s in times)], 16)
    slowdown = Slowdown(streams_beside_prompt=1.5, prompt_beside_streams=1.5)
    outcome = simulate(trace, Fleet(spec(slowdown=slowdown, max_num_seqs=1), 2), "round_robin")
    speed = 1 - share + share / 1.5  # of the stream, in passes
    assert outcome.e2e_s[0] == pytest.approx(2000 * 0.010 / speed, rel=0.002)


def test_what_both_do_decides_how_much_they_slow_down() -> None:
    table = Slowdown(1.1, 1.5, 1.25, 2.0)
    stream, prompt = TraceRequest(0.0, 1, 1001), TraceRequest(5.0, 491, 1)
    read = run(table, stream, prompt)
    assert read.ttft_s[1] == pytest.approx(0.5 * 1.25)
    assert read.e2e_s[0] == pytest.approx(0.010 + 1000 * 0.010 + 0.625 * (1 - 1 / 1.5))
    assert run(table, prompt, prompt).ttft_s.tolist() == pytest.approx([1.0, 1.0])
    streams = run(table, stream, stream).e2e_s.tolist()
    assert streams == pytest.approx([0.010 * 2.0 + 1000 * 0.010 * 1.1] * 2)


def test_several_neighbours_add_up() -> None:
    prompts = [TraceRequest(0.0, 491, 1)] * 3
    assert run(Slowdown(prompt_beside_prompt=1.5), *prompts, workers=3).ttft_s.tolist() == pytest.approx([1.0] * 3)


def test_the_same_load_gives_the_same_run() -> None:
    trace = Synthetic(requests=200, rate=12, prompt=100, output=20).trace()
    one, other = (
        simulate(trace, Fleet(spec(slowdown=TWICE, max_token_delay_s=0.02), 2, spec(slowdown=TWICE), 1)) for _ in "12"
    )
    assert (one.e2e_s == other.e2e_s).all() and one.gaps.percentile(99) == other.gaps.percentile(99)


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0.001, 0.99), st.floats(1.0, 4.0)), max_size=8),
)
def test_no_work_is_lost_or_done_twice_when_the_speed_changes(
    num_passes: int, changes: list[tuple[float, float]]
) -> None:
    stretch = Stretch(5.0, 0.010, num_passes, [], 1, 0)
    now, times, factors = 5.0, [5.0], [1.0]
    for part, factor in changes:
        now += part * (stretch.end_s - now)
        stretch.go_on(now, factor)
        times.append(now)
        factors.append(factor)
    end_s = stretch.end_s
    work_s = sum(
        (later - earlier) / factor for (earlier, later), factor in zip(pairwise([*times, end_s]), factors, strict=True)
    )
    assert work_s == pytest.approx(num_passes * 0.010)
    spans = stretch.ended()
    assert sum(count for _, count in spans) == num_passes
    assert sum(seconds * count for seconds, count in spans) == pytest.approx(end_s - 5.0)
    assert all(0.010 * (1 - 1e-6) <= seconds <= 0.010 * max(factors) * (1 + 1e-6) for seconds, _ in spans)


def test_a_file_may_have_a_table_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"

    def load(slowdown: object) -> Slowdown | None:
        path.write_text(json.dumps({"pass_cost": {"1": 0.01}, "slowdown": slowdown}))
        return WorkerSpec.load(path).slowdown

    assert load({"streams_beside_prompt": 1.3}) == Slowdown(streams_beside_prompt=1.3)
    assert load(None) is None
    for bad in ([1], {"streams": 1.3}, {"streams_beside_prompt": 0.9}, {"streams_beside_prompt": "much"}):
        with pytest.raises(InvalidOptionError, match="slowdown"):
            load(bad)


def test_what_a_stream_reads_is_its_own() -> None:
    """100 tokens before the first of its ten passes, 110 after the last."""
    outcome = simulate(Trace([TraceRequest(0.0, 100, 11)], 16), Fleet(spec(stream_context_s=0.020), 1))
    assert outcome.ttft_s[0] == pytest.approx(0.109)
    assert outcome.e2e_s[0] == pytest.approx(0.109 + 10 * (0.010 + 0.020 * 0.105))


def test_rows_of_streams_may_cost_more_than_rows_of_prompts() -> None:
    requests = [TraceRequest(0.0, 100, 11), TraceRequest(0.0, 100, 11)]
    outcome = simulate(Trace(requests, 16), Fleet(spec(stream_row_s=0.002), 1))
    assert outcome.ttft_s.tolist() == pytest.approx([0.109, 0.109 + 0.110 + 0.002])
    both_s, one_s = 0.011 + 2 * 0.002, 0.010 + 0.002
    assert outcome.e2e_s.tolist() == pytest.approx([0.221 + 9 * both_s, 0.221 + 9 * both_s + one_s])
