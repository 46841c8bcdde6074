"""Every method of the table on a toy target: same tokens as plain decoding, trees inside their budgets, nothing kept.

The toy asserts that every row attends to exactly the positions it should, so a drafter that writes KV where it must not
fails at once. A method added to the table is tested here without being told."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.spec.methods import PROPOSERS
from paceline.spec.proposer import StepContext
from paceline.spec.speculator import Speculator
from tests.toy import VOCAB, run_all, toy_core, toy_request

METHODS = list(PROPOSERS)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [4, 4, 4, 4], list(range(20)), [7, 8] * 9, [0, 1, 2]]


def config(method: str, **more: Any) -> dict[str, Any]:
    return {"method": method, **PROPOSERS[method].example, **more}


def requests(**params: Any) -> list[Request]:
    return [toy_request(str(i), p, max_tokens=12 + i, seed=i, **params) for i, p in enumerate(PROMPTS)]


def plain(**params: Any) -> list[list[int]]:
    return [run_all(toy_core(), [r])[0] for r in requests(**params)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}], ids=str)
@pytest.mark.parametrize("sharpness", [0.5, 6.0], ids=["flat", "sharp"])
def test_same_tokens_as_plain_decoding(method: str, params: dict[str, Any], sharpness: float) -> None:
    expected = [run_all(toy_core(sharpness=sharpness), [r])[0] for r in requests(**params)]
    core = toy_core(config(method), sharpness=sharpness, num_blocks=256)
    assert run_all(core, requests(**params)) == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"logit_bias": {3: 5.0, 4: -100.0}, "min_tokens": 6},
        {"allowed_token_ids": [1, 2, 3, 4, 5, 23], "min_p": 0.05},
        {"top_p": 0.7, "stop_token_ids": [9]},
    ],
    ids=lambda p: next(iter(p)),
)
def test_every_sampling_option(method: str, params: dict[str, Any]) -> None:
    params = {"temperature": 0.9, **params}
    assert run_all(toy_core(config(method), num_blocks=256), requests(**params)) == plain(**params)


@pytest.mark.parametrize("method", METHODS)
def test_under_preemption_and_chunked_prefill(method: str) -> None:
    core = toy_core(config(method), num_blocks=11, max_num_batched_tokens=12, prefix_caching=True)
    batch = requests()
    assert run_all(core, batch) == plain()
    assert sum(r.num_preemptions for r in batch) > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("method", METHODS)
def test_after_a_prefix_cache_hit(method: str) -> None:
    core = toy_core(config(method), num_blocks=256)
    prompt = list(range(16)) * 2
    [first] = run_all(core, [toy_request("a", prompt)])
    again = toy_request("b", prompt)
    assert run_all(core, [again]) == [first]
    assert again.num_cached_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_cancelled_in_mid_draft(method: str) -> None:
    core = toy_core(config(method), num_blocks=256)
    batch = requests()
    for request in batch:
        core.add_request(request)
    for _ in range(3):
        core.step()
    core.abort("2")
    core.check_integrity()
    while core.has_requests:
        core.step()
        core.check_integrity()
    expected = plain()
    assert [r.output_token_ids for i, r in enumerate(batch) if i != 2] == expected[:2] + expected[3:]
    assert core.kv.pool.num_free == core.kv.pool.num_blocks


def test_mixed_methods_in_one_batch() -> None:
    choices: list[dict[str, Any]] = [{"off": True}, {"num_speculative_tokens": 2}, {"node_budget": 3}]
    choices += [{"method": name} for name, row in PROPOSERS.items() if row.per_request]
    core = toy_core({"method": "suffix"}, num_blocks=512, max_num_seqs=32)
    batch = [
        toy_request(str(i), [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=16, speculative=choice)
        for i, choice in enumerate(choices)
    ]
    for request in batch:
        core.speculator.check_request(request.sampling_params)
    [expected] = run_all(toy_core(), [toy_request("x", [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=16)])
    assert run_all(core, batch) == [expected] * len(batch)
    assert {"suffix", "ngram", "none"} <= set(core.speculator.stats())


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_kept_of_a_request_that_is_gone(method: str) -> None:
    """Whatever a proposer maps request ids to is empty when nobody is left."""
    core = toy_core(config(method), num_blocks=256)
    run_all(core, requests())
    # The engine tells proposers about the last request with the next step.
    core.speculator.observe(StepContext([], gone=core._gone))
    ids = {str(i) for i in range(len(PROMPTS))}
    for proposer in core.speculator.proposers.values():
        for name, value in vars(proposer).items():
            if isinstance(value, dict | set):
                assert not ids & {key for key in value if isinstance(key, str)}, f"{method}.{name} keeps {value}"


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_trees_stay_inside_any_budget(method: str, data: st.DataObject) -> None:
    """Odd contexts: one token, one value over and over, the vocabulary's last id; any room, any output so far."""
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
    num_output = data.draw(st.integers(0, len(tokens) - 1))
    max_tokens = num_output + data.draw(st.integers(1, 20))
    core = toy_core(config(method), num_blocks=256)
    request = toy_request("a", tokens[: len(tokens) - num_output], max_tokens=max_tokens)
    request.token_ids += tokens[len(tokens) - num_output :]
    core.kv.reserve(request, len(tokens) + core.speculator.needs.lookahead_slots)
    fill_kv(core, request)
    for _ in range(3):
        [tree] = core.speculator.propose(StepContext([request]))  # checks the tree against the budget
        assert max(tree.depths(), default=0) <= request.max_draft_depth


def fill_kv(core: Any, request: Request) -> None:
    """The target's KV of every token but the last, as after a real pass."""
    size = core.runner.block_size
    for position, token in enumerate(request.token_ids[:-1]):
        slot = request.block_ids[position // size] * size + position % size
        core.runner.kv_cache[0, 0, slot] = token
        core.runner.kv_cache[0, 1, slot] = position


def shapes(trees: Sequence[DraftTree]) -> list[tuple[list[int], list[int]]]:
    return [(tree.token_ids, tree.parents) for tree in trees]


@pytest.mark.parametrize("method", ["ngram", "suffix", "oracle"])
def test_host_methods_draft_the_same_alone_and_in_a_batch(method: str) -> None:
    services = toy_core().speculator._services
    sequences = [[*p, *range(10)] for p in PROMPTS]
    extra = {"sequences": sequences, "shape": "random", "accuracy": 0.5} if method == "oracle" else {}
    batch = requests()
    together = Speculator(config(method, **extra), services).propose(StepContext(batch))
    alone = [Speculator(config(method, **extra), services).propose(StepContext([r]))[0] for r in batch]
    assert shapes(together) == shapes(alone)
