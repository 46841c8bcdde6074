"""The step loop on the toy target: whatever is drafted, batched, chunked or preempted, the output is the plain one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft_counts import DraftCounts
from paceline.core.forward import ForwardBatch
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engine.core import EngineCore
from paceline.engine.row_cost import RowCost
from tests.toy import EOS, VOCAB, ToyDecoder, run_all, toy_core, toy_request

SHAPES = ["chain", (4, 2, 1), (8,), (1, 1, 3, 1), "random"]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB - 1, size=rng.integers(1, 30)).tolist() for _ in range(count)]


def requests(count: int, **params: object) -> list[Request]:
    return [toy_request(f"r{i}", prompt, seed=i, **params) for i, prompt in enumerate(prompts(count))]


def plain(count: int, **params: object) -> list[list[int]]:
    return [run_all(toy_core(), [request])[0] for request in requests(count, **params)]


def oracle(truth: list[list[int]], accuracy: float, shape: object) -> dict[str, object]:
    sequences = [p + out for p, out in zip(prompts(len(truth)), truth, strict=True)]
    return {
        "method": "oracle",
        "sequences": sequences,
        "accuracy": accuracy,
        "shape": shape,
        "num_speculative_tokens": 6,
        "node_budget": 24,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_never_change_the_output(shape: object, accuracy: float, temperature: float) -> None:
    truth = plain(12, temperature=temperature)
    core = toy_core(oracle(truth, accuracy, shape))
    assert run_all(core, requests(12, temperature=temperature)) == truth


def test_a_perfect_chain_takes_one_step_per_seven_tokens() -> None:
    truth = plain(1, ignore_eos=True, max_tokens=15)
    core = toy_core(oracle(truth, 1.0, "chain"))
    state = core.add_request(requests(1, ignore_eos=True, max_tokens=15)[0])
    while core.has_requests:
        core.step()
    assert state.metrics is not None
    # 1 token from the prompt, then 6 accepted + 1 bonus twice
    assert state.metrics.num_steps == 3
    assert state.metrics.mean_acceptance_length == 5.0
    assert state.metrics.accepted_per_position == [2] * 6
    assert state.metrics.draft_acceptance_rate == 1.0
    assert state.metrics.num_wasted_tokens == 0 and state.metrics.draft_s > 0.0
    assert state.metrics.by_member == {"oracle": DraftCounts(12, 12, [2] * 6, num_drafts=2)}
    assert state.request.token_sources == ["target", *(["oracle"] * 6 + ["bonus"]) * 2]


def test_a_request_knows_what_each_member_did_for_it() -> None:
    truth = plain(2, ignore_eos=True, max_tokens=40)
    right, wrong = oracle(truth, 1.0, "chain"), oracle(truth, 0.0, "chain")
    core = toy_core({"method": "merge", "members": [right, wrong], "node_budget": 8})
    states = [core.add_request(job) for job in requests(2, ignore_eos=True, max_tokens=40)]
    while core.has_requests:
        core.step()
    for state in states:
        assert state.metrics is not None
        members, metrics = state.metrics.by_member, state.metrics
        assert members["oracle"].num_accepted_tokens == metrics.num_accepted_tokens > 0
        assert members["oracle#2"].num_accepted_tokens == 0 < members["oracle#2"].num_wasted_tokens
        assert sum(counts.num_draft_tokens for counts in members.values()) == metrics.num_draft_tokens
    stats = core.speculator.stats()["merge"]["by_member"]
    for name in ("oracle", "oracle#2"):
        total = sum(state.metrics.by_member[name].num_draft_tokens for state in states if state.metrics)
        assert stats[name]["num_draft_tokens"] == total


def test_every_pass_is_counted_once_and_a_methods_totals_are_those_of_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = plain(4, ignore_eos=True, max_tokens=30)
    members = [oracle(truth, 0.8, "chain"), oracle(truth, 0.3, (2, 2, 1))]
    core = toy_core({"method": "merge", "members": members, "node_budget": 8})
    counted: list[int] = []
    of_pass = DraftCounts.of_pass

    def noted(tree: DraftTree, accepted: Sequence[int], num_tokens: int) -> DraftCounts:
        counted.append(len(tree))
        return of_pass(tree, accepted, num_tokens)

    monkeypatch.setattr(DraftCounts, "of_pass", noted)
    states = [core.add_request(job) for job in requests(4, ignore_eos=True, max_tokens=30)]
    while core.has_requests:
        core.step()
    total = DraftCounts.total(state.metrics.counts for state in states if state.metrics)
    assert len(counted) == total.num_steps and sum(counted) == total.num_draft_tokens > 0
    assert total.num_emitted_tokens == sum(state.request.num_output_tokens for state in states) == 4 * 30
    assert set(total.by_member) == {"oracle", "oracle#2"}
    stats = core.speculator.stats()["merge"]
    assert {name: stats[name] for name in total.to_dict()} == total.to_dict()
    assert stats["by_member"].keys() == total.by_member.keys()
    for name, member in total.by_member.items():
        assert stats["by_member"][name].items() >= member.to_dict().items()
    assert (stats["num_steps"], stats["num_drafts"]) == (total.num_steps, total.num_drafts)
    assert stats["num_emitted_tokens"] == total.num_emitted_tokens


@pytest.mark.parametrize("method", [None, "oracle"])
def test_chunked_prefill_and_batching_do_not_change_the_output(method: str | None) -> None:
    truth = plain(8)
    for budget in (8, 11, 64):
        core = toy_core(oracle(truth, 0.7, (2, 2, 1)) if method else None, max_num_batched_tokens=budget)
        assert run_all(core, requests(8)) == truth


def test_preemption_recomputes_and_loses_nothing() -> None:
    truth = plain(8, max_tokens=40, ignore_eos=True)
    core = toy_core(oracle(truth, 0.6, (3, 2, 1)), num_blocks=30, prefix_caching=False)
    batch = requests(8, max_tokens=40, ignore_eos=True)
    assert run_all(core, batch) == truth
    assert sum(request.num_preemptions for request in batch) > 0, "the pool was meant to be too small"


def test_a_shared_prefix_is_computed_once() -> None:
    core = toy_core()
    prompt = list(range(18))
    first, second = toy_request("a", prompt), toy_request("b", prompt)
    assert run_all(core, [first]) == run_all(core, [second])
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 16  # whole blocks of 4 before the last token


def test_the_last_pass_of_a_request_is_reused_too() -> None:
    core = toy_core(max_num_batched_tokens=8)
    prompt = list(range(18))
    run_all(core, [toy_request("a", prompt, max_tokens=1)])
    again = toy_request("b", prompt, max_tokens=1)
    run_all(core, [again])
    assert again.num_cached_tokens == 16


def test_the_first_to_come_is_the_first_served() -> None:
    core = toy_core(max_num_seqs=2)
    batch = requests(6, ignore_eos=True, max_tokens=8)
    for request in batch:
        core.add_request(request)
    finished: list[str] = []
    while core.has_requests:
        finished += [state.request.request_id for state in core.step() if state.request.finished]
    assert finished == [request.request_id for request in batch]


def test_a_draft_never_starves_the_requests_behind_it() -> None:
    truth = plain(4, ignore_eos=True)
    core = toy_core(oracle(truth, 1.0, (8,)), max_num_batched_tokens=8, max_num_seqs=4)
    for request in requests(4, ignore_eos=True):
        core.add_request(request)
    while core.has_requests:
        running = [r for r in core.scheduler.running if r.num_computed_tokens == r.num_tokens - 1]
        before = {r.request_id: r.num_tokens for r in running}
        if len(running) == 4:
            core.step()
            assert all(r.num_tokens > before[r.request_id] for r in running)
        else:
            core.step()


@pytest.mark.parametrize("method", [None, "oracle"])
def test_eos_and_length_end_a_request_inside_an_accepted_block(method: str | None) -> None:
    for max_tokens in (1, 2, 5, 9):
        truth = plain(12, max_tokens=max_tokens)
        core = toy_core(oracle(truth, 1.0, "chain") if method else None)
        batch = requests(12, max_tokens=max_tokens)
        assert run_all(core, batch) == truth
        for request in batch:
            ended = request.token_ids[-1] == EOS
            assert request.finish_reason == ("stop" if ended else "length")
            assert EOS not in request.output_token_ids[:-1]


def test_stop_strings_straddle_an_accepted_block() -> None:
    for include in (False, True):
        truth = plain(1, ignore_eos=True, max_tokens=15)
        text = "".join(chr(ord("a") + token) for token in truth[0])
        stop = text[5:8]
        texts = []
        for speculative in (None, oracle(truth, 1.0, "chain")):
            core = toy_core(speculative)
            request = requests(1, ignore_eos=True, max_tokens=15, stop=[stop], include_stop_str_in_output=include)[0]
            state = core.add_request(request)
            while core.has_requests:
                core.step()
            texts.append((state.detokenizer.text, request.finish_reason, request.stop_reason, request.output_token_ids))
        assert texts[0] == texts[1]
        end = text.index(stop) + (len(stop) if include else 0)
        assert texts[0][:3] == (text[:end], "stop", stop)


def test_abort_in_mid_draft_gives_everything_back() -> None:
    truth = plain(4, ignore_eos=True)
    core = toy_core(oracle(truth, 1.0, (4, 4)))
    batch = requests(4, ignore_eos=True)
    for request in batch:
        core.add_request(request)
    core.step()
    core.step()
    core.abort("r1")
    core.check_integrity()
    assert batch[1].finish_reason == "abort"
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert [request.output_token_ids for request in batch if request is not batch[1]] == [truth[0], truth[2], truth[3]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_traffic_keeps_every_block_accounted_for(data: st.DataObject) -> None:
    """Random arrivals, cancellations, preemptions and trees, with check_integrity() after every step."""
    pool = prompts(10, seed=1)
    truth = [run_all(toy_core(), [toy_request("t", p, 12, i)])[0] for i, p in enumerate(pool[:4])]
    speculative = {
        "method": "oracle",
        "sequences": [p + out for p, out in zip(pool, truth, strict=False)],
        "accuracy": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        "shape": data.draw(st.sampled_from(["chain", (3, 2, 1), "random"])),
        "num_speculative_tokens": 4,
        "node_budget": 12,
    }
    core = toy_core(
        speculative,
        num_blocks=data.draw(st.integers(14, 40)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.integers(8, 40)),
        prefix_caching=data.draw(st.booleans()),
    )
    alive: dict[str, tuple[int, Request]] = {}
    for step in range(data.draw(st.integers(5, 30))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort"]))
        if action == "add":
            which = data.draw(st.integers(0, 3))
            request = toy_request(f"q{step}", pool[which], 12, which)
            alive[request.request_id] = (which, request)
            core.add_request(request)
        elif action == "abort" and alive:
            victim = data.draw(st.sampled_from(sorted(alive)))
            core.abort(victim)
            del alive[victim]
        else:
            core.step()
        core.check_integrity()
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert core.kv.pool.num_free == core.kv.pool.num_blocks
    for which, request in alive.values():
        assert request.output_token_ids == truth[which]


def core_with_slow_rows(row_s: float, limit_s: float | None, **options: Any) -> EngineCore:
    """Rows take `row_s` each, whatever they really take."""
    core = toy_core(max_token_delay_s=limit_s, **options)
    core.scheduler.row_cost.row_s = row_s
    core.scheduler.note_pass = lambda scheduled, seconds: None  # type: ignore[method-assign]
    return core


def rows_of_last_pass(core: EngineCore) -> int:
    seen: list[ForwardBatch] = core.runner.model.seen  # type: ignore[attr-defined]
    return seen[-1].num_rows


def long_prompt(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, VOCAB - 1, length).tolist()
    return tokens


def longest_pass(limit_s: float | None, row_s: float) -> tuple[int, list[int], list[int]]:
    """(rows of the longest pass while a request decodes, and both outputs)."""
    core = core_with_slow_rows(row_s, limit_s, max_num_batched_tokens=256, num_blocks=64)
    neighbour = core.add_request(toy_request("neighbour", [1, 2, 3], seed=1, max_tokens=60, ignore_eos=True)).request
    core.step()
    other = core.add_request(toy_request("long", long_prompt(150), seed=2)).request
    longest = 0
    while core.has_requests:
        is_decoding = not neighbour.finished
        core.step()
        core.check_integrity()
        if is_decoding:
            longest = max(longest, rows_of_last_pass(core))
    return longest, neighbour.output_token_ids, other.output_token_ids


def test_a_prompt_lengthens_a_pass_by_no_more_than_the_limit() -> None:
    free, neighbour, other = longest_pass(None, 0.001)
    assert free == 151
    limited, same_neighbour, same_other = longest_pass(0.03, 0.001)
    assert limited == 31 and (same_neighbour, same_other) == (neighbour, other)
    assert longest_pass(0.03, 1.0)[0] == 5  # slow rows: a prompt makes progress all the same
    assert longest_pass(0.03, 1e-9)[0] == free


def test_a_prompt_alone_is_read_in_longer_passes() -> None:
    core = core_with_slow_rows(0.001, 0.01, max_num_batched_tokens=256, num_blocks=64)
    core.add_request(toy_request("long", long_prompt(198), seed=2, max_tokens=2))
    core.step()
    assert rows_of_last_pass(core) == 80


@pytest.mark.parametrize(("num_decoding", "context_s"), [(0, 0.0), (2, 0.0), (2, 1.0)])
def test_a_first_token_does_not_wait_for_the_long_prompt_of_another_request(
    num_decoding: int, context_s: float
) -> None:
    core = core_with_slow_rows(0.001, 0.02, max_num_batched_tokens=64, num_blocks=128)
    core.scheduler.row_cost.context_s = context_s  # 1 s: a few rows after a long context take all the time there is
    for i in range(num_decoding):
        core.add_request(toy_request(f"neighbour {i}", [1, 2, i], max_tokens=60, ignore_eos=True))
    core.step()
    long = core.add_request(toy_request("long", long_prompt(240), seed=2)).request
    core.step()
    for i in range(12):  # one short prompt after the other
        before = long.num_computed_tokens
        short = core.add_request(toy_request(f"short {i}", [i, 3, 4, 5, 6], max_tokens=1)).request
        core.step()
        core.check_integrity()
        assert short.finished
        assert long.finished or long.num_computed_tokens > before  # and the long one makes progress


def test_a_draft_lengthens_a_pass_by_no_more_than_the_limit() -> None:
    truth = plain(2, max_tokens=40, ignore_eos=True)
    config = oracle(truth, 1.0, "chain") | {"num_speculative_tokens": 30, "node_budget": 30}
    core = core_with_slow_rows(0.001, 0.02, speculative=config)
    states = [core.add_request(request).request for request in requests(2, max_tokens=40, ignore_eos=True)]
    rows = []
    while core.has_requests:
        core.step()
        rows.append(rows_of_last_pass(core))
    assert max(rows[1:]) == 2 * (1 + 20)
    assert [request.output_token_ids for request in states] == truth


def test_one_call_with_many_samples_leaves_half_of_the_seats_to_others() -> None:
    core = core_with_slow_rows(0.0001, 1.0, max_num_seqs=8)
    for i in range(30):
        request = toy_request(f"many-{i}", [1, 2, i % 20], max_tokens=20, ignore_eos=True)
        core.add_request(replace(request, call_id="many"))
    core.step()
    assert len(core.scheduler.running) == 8  # there is no other call
    neighbour = core.add_request(replace(toy_request("neighbour", [5, 6], max_tokens=4), call_id="neighbour")).request
    while core.has_requests and not neighbour.finished:
        core.step()
        core.check_integrity()
    others = [toy_request(f"other {i}", [7, i], max_tokens=8, ignore_eos=True) for i in range(3)]
    for i, request in enumerate(others):
        core.add_request(replace(request, call_id=f"other {i}"))
    most = 0
    while core.has_requests:
        core.step()
        core.check_integrity()
        calls = [request.call_id for request in core.scheduler.running]
        if {"other 0", "other 1", "other 2"} & set(calls):
            most = max(most, len([call for call in calls if call != "many"]))
    assert most == 3, "all three ran beside the call of many samples"


def test_the_cost_of_rows_and_of_their_context_is_learned() -> None:
    rng = np.random.default_rng(0)
    cost = RowCost()
    for _ in range(200):
        num_rows, context = int(rng.integers(8, 64)), int(rng.integers(50, 8000))
        cost.learn(num_rows, num_rows * context, num_rows * (0.0007 + 0.0006 * context / 1000))
    assert cost.at(0) == pytest.approx(0.0007, rel=0.05) and cost.at(8000) == pytest.approx(0.0055, rel=0.05)
    assert cost.rows_within(0.03, 0, 500) in (35, 36, 37, 38) and cost.rows_within(0.03, 8000, 500) == 5
    assert cost.rows_within(1.0, 0, 10) == 10 and RowCost().rows_within(0.0, 0, 10) == 10


@pytest.mark.parametrize(("kernels", "expected"), [(2, 1), (None, 3)])
def test_beside_kernels_with_threads_of_their_own_pytorch_has_one(
    kernels: int | None, expected: int, request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(3)
    decoder = ToyDecoder()
    decoder.num_threads = kernels  # type: ignore[assignment]
    core = toy_core(decoder=decoder)
    found: list[int] = []
    core.observers.append(lambda step: found.append(torch.get_num_threads()))
    run_all(core, requests(2))
    assert found and set(found) == {expected}
    assert torch.get_num_threads() == 3
