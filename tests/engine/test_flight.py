"""A pass launched before the last one was collected: the same outputs, and nothing of it is left behind."""

import random
from typing import Any

import pytest

from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.models.padded_decoder import PassKind, StaticPass
from paceline.models.plain_passes import PlainPasses
from paceline.models.static_inputs import InputViews, PassRoom
from tests.toy import EOS, run_all, toy_core, toy_request

SIZES = (1, 2, 4, 8, 16, 24, 48, 64)


def ahead_core(**options: Any) -> EngineCore:
    return toy_core(sizes=SIZES, **options)


def ordinary_output(request: Request) -> list[int]:
    return run_all(toy_core(), [again(request)])[0]


def again(request: Request) -> Request:
    params = request.sampling_params
    return Request(request.request_id, request.prompt_token_ids, params, request.max_tokens, request.seed, (EOS,))


def some_request(rng: random.Random, number: int, chosen_by_host: float) -> Request:
    stop = rng.randrange(8)
    options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.8])}
    options |= rng.choice([{}, {}, {"stop": [chr(ord("a") + stop)]}, {"stop_token_ids": [stop]}])
    if rng.random() < chosen_by_host:
        options |= rng.choice([{"top_k": 3}, {"min_tokens": 3}, {"repetition_penalty": 1.2}])
    prompt = [1, 2, 3, 4, 5, 6, 7][: rng.randrange(1, 8)] * rng.randrange(1, 4)
    made = toy_request(f"r{number}", prompt, max_tokens=rng.randrange(3, 24), seed=number, **options)
    made.eos_token_ids, made.stop_token_ids = (EOS,), made.stop_token_ids | {EOS}
    return made


def test_most_passes_of_plain_decoding_are_launched_ahead() -> None:
    core = ahead_core()
    requests = [toy_request(f"r{i}", [1, 2, i], max_tokens=20, seed=i, ignore_eos=True) for i in range(4)]
    assert run_all(core, requests) == [ordinary_output(request) for request in requests]
    assert core.clock.num_ahead == core.clock.num_steps - 1


@pytest.mark.parametrize(
    "options", [{"top_k": 2, "temperature": 0.5}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.2}]
)
def test_no_pass_is_launched_ahead_of_tokens_that_the_host_chooses(options: dict[str, Any]) -> None:
    core = ahead_core()
    run_all(core, [toy_request("r", [1, 2, 3], **options)])
    assert core.clock.num_steps > 3 and core.clock.num_ahead == 0


def test_no_pass_is_launched_ahead_of_a_draft_of_the_host() -> None:
    core = ahead_core(speculative={"method": "recycling", "num_speculative_tokens": 3, "node_budget": 6})
    run_all(core, [toy_request("r", [1, 2, 3] * 4, max_tokens=20)])
    assert core.clock.num_steps > 3 and core.clock.num_ahead == 0


def test_no_pass_is_launched_ahead_where_a_request_might_be_preempted() -> None:
    core = ahead_core(num_blocks=17)
    requests = [toy_request(f"r{i}", [1, 2, 3, i], max_tokens=40, seed=i) for i in range(4)]
    assert run_all(core, requests) == [ordinary_output(request) for request in requests]
    assert core.clock.num_ahead == 0


def test_a_request_that_ends_leaves_a_surplus_row_and_no_surplus_token() -> None:
    core = ahead_core()
    options: dict[str, Any] = {"max_tokens": 30, "seed": 4, "temperature": 1.0, "ignore_eos": True}
    text = ordinary_output(toy_request("r", [3, 1], **options))
    stopped = toy_request("r", [3, 1], stop_token_ids=[text[5]], **options)
    found = run_all(core, [stopped])[0]
    assert found == text[: text.index(text[5]) + 1] and stopped.finish_reason == "stop"
    core.check_integrity()
    assert not core.has_requests and core.kv.usage == 0.0
    other = toy_request("s", [5, 6], max_tokens=9, seed=1)
    assert run_all(core, [other])[0] == ordinary_output(other), "the pass that nobody awaits is not in the way"


def test_a_pass_that_is_made_between_two_others_leaves_their_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured pass runs once when it is made, and writes tokens."""
    make = PlainPasses.make

    def scribbling(self: PlainPasses, inputs: InputViews, room: PassRoom, kind: PassKind) -> StaticPass:
        inputs.drawn_before.fill_(3)
        inputs.fill_with_padding()
        return make(self, inputs, room, kind)

    monkeypatch.setattr(PlainPasses, "make", scribbling)
    requests = [toy_request(f"r{i}", [1, 2, i], max_tokens=6 + 3 * i, seed=i, ignore_eos=True) for i in range(6)]
    core = ahead_core()
    assert run_all(core, requests) == [ordinary_output(request) for request in requests]
    assert core.clock.num_ahead > 10


def test_a_request_that_is_aborted_with_a_pass_on_its_way_gives_its_blocks_to_others_unharmed() -> None:
    core = ahead_core(num_blocks=40, max_num_batched_tokens=16)
    first = toy_request("a", [1, 2, 3, 4, 5], max_tokens=50, seed=1, ignore_eos=True)
    core.add_request(first)
    for _ in range(6):
        core.step()
    core.abort("a")
    core.check_integrity()
    others = [toy_request(f"b{i}", [1, 2, 3, 4, 5, 6, i], max_tokens=30, seed=i) for i in range(4)]
    assert run_all(core, others) == [ordinary_output(request) for request in others]


def run_with_random_events(core: EngineCore, rng: random.Random, waiting: list[Request]) -> set[str]:
    """Requests arrive and are cancelled at random, and all are answered; returns the ids of the cancelled ones."""
    begun: list[Request] = []
    aborted = set()
    while waiting or core.has_requests:
        for _ in range(rng.choice([0, 0, 0, 1, 4]) if core.has_requests else 1):
            if waiting:
                begun.append(waiting.pop())
                core.add_request(begun[-1])
        if begun and rng.random() < 0.04:
            victim = rng.choice(begun)
            if not victim.finished:
                aborted.add(victim.request_id)
                core.abort(victim.request_id)
        core.step()
        core.check_integrity()
    assert core.kv.usage == 0.0
    return aborted


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_cancellations_stops_and_small_pools_change_no_output(seed: int) -> None:
    rng = random.Random(seed)
    core = ahead_core(
        num_blocks=rng.choice([26, 40, 64]),
        max_num_batched_tokens=rng.choice([8, 16, 40]),
        prefix_caching=rng.random() < 0.7,
        max_num_seqs=rng.choice([3, 8]),
    )
    requests = [some_request(rng, i, chosen_by_host=0.1 * (seed % 2)) for i in range(30)]
    aborted = run_with_random_events(core, rng, list(requests))
    for request in requests:
        expected, found = ordinary_output(request), request.output_token_ids
        assert found == (expected[: len(found)] if request.request_id in aborted else expected), request
    assert core.clock.num_ahead > 5, "meant to run ahead"
