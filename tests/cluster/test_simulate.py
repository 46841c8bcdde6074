"""The simulator: exact where it can be worked out by hand, and clear about what it cannot read."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.cluster.capacity import capacity
from paceline.cluster.simulate.lru_cache import LRUCache
from paceline.cluster.simulate.plan import Planner, Targets, replicas
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.trace import Synthetic, Trace, TraceRequest, read_trace
from paceline.cluster.worker_spec import WorkerSpec
from paceline.errors import InvalidOptionError
from tests.cluster.specs import spec

# A pass of n rows takes 9 + n ms (tests/cluster/specs.py).


def run(*requests: TraceRequest, **changes: object) -> "np.ndarray[object, object]":
    return np.round(simulate(Trace(requests, 16), Fleet(spec(**changes), 1)).ttft_s, 6)


def test_one_request_takes_its_prompt_and_then_a_pass_per_token() -> None:
    outcome = simulate(Trace([TraceRequest(1.0, 100, 11)], 16), Fleet(spec(), 1))
    assert outcome.ttft_s[0] == pytest.approx(0.109)
    assert outcome.e2e_s[0] == pytest.approx(0.109 + 10 * 0.010)
    assert outcome.gaps.percentile(50) == pytest.approx(0.010, rel=0.02)


def test_speculation_needs_fewer_passes_of_more_rows() -> None:
    outcome = simulate(Trace([TraceRequest(0.0, 100, 11)], 16), Fleet(spec(tokens_per_pass=2.5, rows_per_stream=4), 1))
    assert outcome.e2e_s[0] == pytest.approx(0.109 + 4 * 0.013)


def test_a_long_prompt_goes_in_chunks_and_its_context_counts() -> None:
    assert run(TraceRequest(0.0, 1024, 1)) == pytest.approx([2 * 0.521])
    assert run(TraceRequest(0.0, 1024, 1), context_s=0.001) == pytest.approx([2 * 0.521 + 1024 * 512 * 1e-6])


def test_a_request_waits_for_the_pass_that_runs_and_holds_up_its_streams() -> None:
    first, second = TraceRequest(0.0, 1, 101), TraceRequest(0.0151, 50, 1)
    outcome = simulate(Trace([first, second], 16), Fleet(spec(), 1))
    assert outcome.ttft_s[1] == pytest.approx(0.020 - 0.0151 + 0.060)  # one pass of 1 + 50 rows
    assert outcome.e2e_s[0] == pytest.approx(0.010 + 100 * 0.010 + 0.050)


def test_a_full_worker_lets_others_wait() -> None:
    requests = [TraceRequest(0.0, 1, 11), TraceRequest(0.0, 1, 11)]
    alone = simulate(Trace(requests, 16), Fleet(spec(max_num_seqs=1), 1))
    assert sorted(alone.ttft_s.round(6)) == [0.010, 0.120]


def test_a_prefix_that_was_computed_is_found_and_an_old_one_is_not() -> None:
    first, again = TraceRequest(0.0, 100, 1, tuple(range(6))), TraceRequest(10.0, 100, 1, tuple(range(6)))
    other = TraceRequest(5.0, 100, 1, tuple(range(10, 16)))
    assert run(first, again) == pytest.approx([0.109, 0.013])
    assert run(first, other, again, num_kv_blocks=8) == pytest.approx([0.109, 0.109, 0.077])  # 2 of 6 blocks are left


def test_a_prefill_worker_takes_the_prompt_and_sends_its_blocks() -> None:
    """96 of 100 tokens there, 96 x 23,040 bytes over the link, 4 rows here."""
    fleet = Fleet(spec(bandwidth=1e7, latency_s=0.001), 1, spec(), 1)
    outcome = simulate(Trace([TraceRequest(0.0, 100, 1, tuple(range(6)))], 16), fleet, policy="remote")
    assert outcome.num_remote == 1 and outcome.hit_rate == 0
    assert outcome.ttft_s[0] == pytest.approx(0.105 + 0.001 + 96 * 23_040 / 1e7 + 0.013)


def test_blocks_travel_while_the_next_chunk_is_computed() -> None:
    """1,024 tokens there in two passes of 521 ms, 16 rows here; the link takes 4 s or 0.1 s for all blocks."""
    prompt = Trace([TraceRequest(0.0, 1040, 1, tuple(range(64)))], 16)
    for all_s in (4.0, 0.1):
        fleet = Fleet(spec(bandwidth=1024 * 23_040 / all_s, latency_s=0.001), 1, spec(), 1)
        left_s = max(0.001 + all_s / 2, 0.001 + all_s - 0.521)  # the last chunk, or what the link had no time for
        outcome = simulate(prompt, fleet, policy="remote")
        assert outcome.ttft_s[0] == pytest.approx(2 * 0.521 + left_s + 0.025)


def test_remote_prefill_spares_the_streams() -> None:
    requests = [TraceRequest(0.0, 1, 200), TraceRequest(0.5, 1600, 10, tuple(range(99)))]
    local, remote = (simulate(Trace(requests, 16), Fleet(spec(), 1, spec(), 1), policy=p) for p in ("local", "remote"))
    assert local.gaps.percentile(100) > 0.5 > 0.03 > remote.gaps.percentile(100)


def test_kv_aware_routing_finds_more_prefixes_than_round_robin() -> None:
    trace = Synthetic(requests=600, rate=4, prompt=600, output=8, groups=12, prefix=512).trace()
    hits = {
        name: simulate(trace, Fleet(spec(num_kv_blocks=200), 3), name).hit_rate for name in ("round_robin", "kv_aware")
    }
    assert hits["kv_aware"] > hits["round_robin"] + 0.1


def test_all_requests_end_under_overload() -> None:
    trace = Synthetic(requests=300, rate=500, prompt=200, output=20).trace()
    outcome = simulate(trace, Fleet(spec(max_num_seqs=4), 2, spec(), 1), policy="cost")
    assert (outcome.ttft_s > 0).all() and (outcome.e2e_s >= outcome.ttft_s).all()


def test_the_same_seed_gives_the_same_run() -> None:
    trace = Synthetic(requests=200, rate=5).trace()
    runs = [simulate(trace, Fleet(spec(), 3), "power_of_two", seed=1) for _ in range(2)]
    assert (runs[0].e2e_s == runs[1].e2e_s).all()


def test_lru_keeps_the_heads_of_prompts_longest() -> None:
    cache = LRUCache(4)
    cache.store([1, 2, 3])
    assert cache.store([7, 8]) == ([7, 8], [3])
    assert cache.match([1, 2, 3]) == 2


def test_capacity_and_replicas_follow_the_formula() -> None:
    """One stream: 100 passes of 10 ms and a prompt of 109 ms."""
    assert capacity(spec(max_num_seqs=1), 100, 100, 0.0) == pytest.approx(1 / 1.109)
    assert capacity(spec(max_num_seqs=1), 100, 100, 0.9) == pytest.approx(1 / 1.019)
    assert replicas(10, 3) == 4 and replicas(0.1, 3) == 1


def test_the_plan_is_the_smallest_cluster_that_meets_the_targets() -> None:
    trace = Synthetic(requests=200, rate=8, prompt=100, output=40, spread=0.2).trace()
    planner = Planner(trace, Targets(ttft_s=0.4, gap_s=0.2))
    found = next(planner.options(spec(dollars_per_hour=1.0), None))
    assert found.meets(0.4, 0.2)
    assert found.num_workers == 1 or not simulate(trace, Fleet(spec(), found.num_workers - 1)).meets(0.4, 0.2)
    assert found.dollars_per_hour == found.num_workers


def test_targets_that_no_cluster_meets_give_no_plan() -> None:
    trace = Synthetic(requests=20, rate=8).trace()
    assert not list(Planner(trace, Targets(ttft_s=1e-6), max_workers=4).options(spec(), spec()))


OWN = '{"arrival_s": 1, "num_prompt_tokens": 40, "num_output_tokens": 5, "block_ids": [3, 4, 5]}'
MOONCAKE = '{"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [1, 2, 3]}'


def test_both_forms_of_traces_are_read_and_sorted() -> None:
    trace = read_trace([OWN, "", OWN.replace("1,", "0,", 1)])
    assert trace.block_size == 16 and [request.arrival_s for request in trace.requests] == [0, 1]
    assert trace.requests[0].keys == (3, 4)  # the third is not full
    mooncake = read_trace([MOONCAKE])
    assert mooncake.block_size == 512 and mooncake.requests == [TraceRequest(1.5, 1025, 7, (1, 2))]
    assert read_trace(['{"block_size": 4, ' + OWN[1:]]).block_size == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no requests"),
        ("nonsense", "line 2: Expecting value"),
        ("[1]", "line 2: expected a JSON object"),
        (OWN.replace("40", "-1"), "num_prompt_tokens must be a whole number above 0, got -1"),
        (OWN.replace("num_output_tokens", "tokens"), "'num_output_tokens' is missing"),
        (OWN.replace("[3, 4, 5]", "[3, 4, 5, 6]"), "4 block ids for 40 tokens in blocks of 16"),
        (OWN.replace("[3, 4, 5]", '["a"]'), "block ids are a list of whole numbers"),
        (MOONCAKE.replace("1500", "NaN"), "is not a time of arrival"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(line: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        read_trace(["", line] if line else [])


@pytest.mark.parametrize("text", ["rats=3", "rate=fast", "rate=0", "requests=0"])
def test_a_bad_load_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError):
        Synthetic.parse(text)


def worker_file(folder: Path, **changes: object) -> str:
    path = folder / "worker.json"
    path.write_text(json.dumps({"pass_cost": {"1": 0.01, "64": 0.02}, "dollars_per_hour": 2.0} | changes))
    return str(path)


def test_worker_files_in_all_forms(tmp_path: Path) -> None:
    assert WorkerSpec.load(worker_file(tmp_path)).pass_cost(64) == 0.02
    (tmp_path / "doctor.json").write_text(json.dumps({"model": {"passes": [{"rows": 1, "median_s": 0.5}]}}))
    doctor = WorkerSpec.load(tmp_path / "doctor.json")
    assert doctor.name == "doctor" and doctor.pass_cost(9) == 0.5
    for bad in ({"pass_cost": []}, {"max_num_seqs": 0}, {"bandwidth": "fast"}, {"pass_cost": {"x": 1}}):
        with pytest.raises(InvalidOptionError, match="worker"):
            WorkerSpec.load(worker_file(tmp_path, **bad))
    with pytest.raises(InvalidOptionError, match="not a worker file"):
        WorkerSpec.load(tmp_path / "gone.json")


def test_the_verb_compares_routers_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "cluster",
        "simulate",
        "--worker",
        worker_file(tmp_path),
        "--load",
        "requests=50,rate=5,prompt=200,output=10",
    ]
    assert main([*base, "--workers", "1", "2", "--router", "round_robin", "kv_aware", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["workers"], row["router"]) for row in rows][:2] == [
        ("1 x worker", "round_robin"),
        ("1 x worker", "kv_aware"),
    ]
    assert main([*base, "--ttft-ms", "2000", "--gap-ms", "500"]) == 0
    assert "1 x worker" in capsys.readouterr().out
    assert main([*base, "--ttft-ms", "0.001", "--max-workers", "2"]) == 1
    assert "meets the targets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2", "--router", "nearest"], "there is no router 'nearest'"),
        (["--prefill", "1", "--decode", "1", "--policy", "hope"], "there is no policy 'hope'"),
        (["--prefill", "1"], "belong together"),
        ([], "give numbers of workers"),
        (["--workers", "0"], "1 decode worker or more"),
    ],
)
def test_bad_arguments_of_the_verb_say_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "simulate", "--worker", worker_file(tmp_path), "--load", "requests=5", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_passes_that_differ_by_chance_spread_the_gaps_and_nothing_else() -> None:
    trace = Synthetic(requests=60, rate=2.0, prompt=50, output=20).trace()
    plain = simulate(trace, Fleet(spec(), 1))
    uneven = simulate(trace, Fleet(spec(pass_spread=(*[0.9] * 90, *[1.9] * 10)), 1))
    assert uneven.ttft_s.tolist() == plain.ttft_s.tolist()
    assert uneven.gaps.percentile(50) == pytest.approx(0.9 * plain.gaps.percentile(50), rel=0.03)
    assert uneven.gaps.percentile(99) > 1.5 * plain.gaps.percentile(50)
    with pytest.raises(InvalidOptionError, match="pass_spread must have one factor or more"):
        spec(pass_spread=())


def test_a_prompt_slows_down_after_passes_that_only_decode_as_in_the_engine() -> None:
    """The engine's price of a row is learned from the newest passes: it begins with few rows and speeds up."""
    limited = spec(max_token_delay_s=0.02)
    alone = simulate(Trace([TraceRequest(0.0, 320, 1)], 16), Fleet(limited, 1))
    later = simulate(Trace([TraceRequest(0.0, 16, 8), TraceRequest(5.0, 320, 1)], 16), Fleet(limited, 1))
    assert later.ttft_s[1] > 1.05 * alone.ttft_s[0]
