"""Calls with many samples, beside others: what a pass leaves for later, and that every sample gets its turn."""

import pytest

from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.engine.many_samples import note_waiting, samples_to_wait
from tests.toy import run_all, toy_core, toy_request

ROW_S = 0.001


def sample(call: str, number: int, sampling_s: float = 0.0) -> Request:
    request = toy_request(f"{call}-{number}", [1, 2, number], seed=number, max_tokens=12, ignore_eos=True, n=2)
    request.call_id, request.sampling_s = call, sampling_s
    return request


def left_out(decoding: list[Request], limit_s: float) -> set[str]:
    return samples_to_wait(decoding, lambda context: ROW_S, limit_s)


def test_a_call_that_is_alone_is_never_delayed() -> None:
    assert left_out([sample("big", i, sampling_s=1.0) for i in range(8)], 0.01) == set()


def test_requests_without_a_call_are_never_delayed() -> None:
    assert left_out([sample("", i, sampling_s=1.0) for i in range(8)], 0.01) == set()


def test_extra_samples_fit_into_the_limit_and_one_of_each_call_runs_whatever_it_takes() -> None:
    slow = [sample("slow", i, sampling_s=0.004) for i in range(6)]
    slower = [sample("slower", i, sampling_s=1.0) for i in range(3)]
    waiting = left_out([sample("neighbour", 0), *slow, *slower], 0.0151)
    assert waiting == {"slow-4", "slow-5", "slower-1", "slower-2"}  # three extra ones of 5 ms each fit


def test_every_sample_takes_its_turn() -> None:
    decoding = [sample("neighbour", 0), *(sample("big", i, sampling_s=0.004) for i in range(16))]
    passes = {request.request_id: 0 for request in decoding}
    for _ in range(60):
        waiting = left_out(decoding, 0.0151)
        note_waiting(decoding, waiting)
        for request in decoding:
            passes[request.request_id] += request.request_id not in waiting
    assert passes.pop("neighbour-0") == 60
    assert max(passes.values()) - min(passes.values()) <= 1  # 4 of 16 in each pass
    assert min(passes.values()) == 15


def core_with(limit_s: float | None) -> EngineCore:
    core = toy_core(max_token_delay_s=limit_s, max_num_seqs=32, num_blocks=256)
    core.scheduler.row_cost.row_s = ROW_S
    core.scheduler.note_pass = lambda scheduled, seconds: None  # type: ignore[method-assign]
    return core


def test_delayed_samples_give_the_same_tokens_and_the_other_request_is_in_every_pass() -> None:
    def requests() -> list[Request]:
        neighbour = toy_request("neighbour", [7, 8], seed=3, max_tokens=20, ignore_eos=True)
        neighbour.call_id = "neighbour"
        return [neighbour, *(sample("big", i) for i in range(12))]

    truth = run_all(core_with(None), requests())
    core, given = core_with(4 * ROW_S), requests()
    for request in given:
        core.add_request(request)
    num_passes, widest = 0, 0
    while not given[0].finished:
        core.step()
        core.check_integrity()
        num_passes += 1
        widest = max(widest, core.runner.model.seen[-1].num_rows)  # type: ignore[attr-defined]
    assert num_passes == 20  # a token in each
    assert widest < 13
    while core.has_requests:
        core.step()
    assert [request.output_token_ids for request in given] == truth


@pytest.mark.parametrize("limit_s", [None, 1.0])
def test_with_a_limit_the_first_sample_runs_first_and_the_others_find_its_prompt_cached(limit_s: float | None) -> None:
    core = core_with(limit_s)
    prompt = [i % 20 for i in range(12)]
    given = []
    for i in range(4):
        request = toy_request(f"call-{i}", prompt, seed=i, max_tokens=4, ignore_eos=True, n=4)
        request.call_id = "call"
        given.append(request)
        core.add_request(request)
    core.step()
    assert [request.num_output_tokens for request in given] == ([1, 1, 1, 1] if limit_s is None else [1, 0, 0, 0])
    while core.has_requests:
        core.step()
        core.check_integrity()
    cached = [request.num_cached_tokens for request in given]
    assert cached[0] == 0 and all(count > 0 for count in cached[1:]) == (limit_s is not None)


def test_what_sampling_took_is_known_for_each_request() -> None:
    core = toy_core()
    request = core.add_request(toy_request("a", [1, 2], max_tokens=3, ignore_eos=True, logprobs=2)).request
    core.step()
    first_s = request.sampling_s
    assert first_s > 0
    for _ in range(2):
        core.step()
    assert 0 < request.sampling_s < 1  # of the last pass, not added up over all


def test_several_calls_with_many_samples_leave_half_of_the_seats_to_others() -> None:
    core = core_with(1.0)
    for call in ("a", "b", "c"):
        for i in range(32):
            core.add_request(sample(call, i))
    core.step()
    core.step()
    core.step()
    assert len(core.scheduler.running) <= 3 + 32 // 2
    neighbour = core.add_request(toy_request("neighbour", [7, 8], seed=3, max_tokens=2, ignore_eos=True)).request
    neighbour.call_id = "neighbour"
    core.step()
    assert neighbour.num_output_tokens == 1
