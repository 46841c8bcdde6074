"""The rules that every drafting method keeps, on a toy target: one function each, which fails where a method breaks it.

A rule knows a method by its name and by its row in the table, nothing else. `test_conformance_toy.py` holds every
method to every rule; `test_conformance_catches.py` shows that bad drafters are caught, and `test_own_drafter.py` that a
row in the table is enough to be tried.
"""

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec.methods import PROPOSERS
from paceline.spec.proposer import Budget, StepContext
from paceline.spec.speculator import check_trees
from tests.spec.conformance_cases import (
    PROMPTS,
    ROOM,
    KnownDecoder,
    assert_nothing_failed,
    config,
    core_has_proposer,
    fresh_trees,
    known_text,
    plain,
    proposer_of,
    requests,
    reserve,
    sequences,
    shapes,
    told,
)
from tests.toy import EOS, VOCAB, run_all, toy_core, toy_request

Rule = Callable[[str], None]  # takes a method's name
TIMES = 3  # that a drafter may see all of the text that repeats itself before it must be right


def drafts_and_is_right_where_the_text_repeats(method: str) -> None:
    """The target repeats itself, so every drafter can know what comes: it must draft, and some of it must be right."""
    text = known_text(0, (1 + TIMES) * EOS)
    prompt, output = text[:EOS], text[EOS:]
    core = toy_core(config(method, [text]), decoder=KnownDecoder(), **ROOM)
    request = toy_request("a", prompt, max_tokens=len(output), **told(method, output))
    assert run_all(core, [request]) == [output]
    assert_nothing_failed(core, method)
    counts = core.speculator.stats().get(method, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
    if not PROPOSERS[method].drafts:
        assert counts["num_draft_tokens"] == 0, f"{method} drafted, but its row says that it does not"
        return
    assert counts["num_draft_tokens"] > 0, f"{method} never drafted, where the text repeats itself"
    assert counts["num_accepted_tokens"] > 0, f"{method} was never right, where the text repeats itself"


def writes_what_plain_decoding_writes(method: str, sharpness: float = 3.0, **params: Any) -> None:
    expected = plain(sharpness, **params)
    core = toy_core(config(method, sequences(expected)), sharpness=sharpness, **ROOM)
    assert run_all(core, requests(method, expected, **params)) == expected
    assert_nothing_failed(core, method)


def survives_preemption_and_chunked_prefill(method: str) -> None:
    expected = plain()
    core = toy_core(config(method, sequences(expected)), num_blocks=11, max_num_batched_tokens=12, prefix_caching=True)
    batch = requests(method, expected)
    assert run_all(core, batch) == expected
    assert sum(request.num_preemptions for request in batch) > 0, "the pool was meant to be too small"
    assert_nothing_failed(core, method)


def survives_a_prefix_cache_hit(method: str) -> None:
    prompt = list(range(16)) * 2
    [expected] = run_all(toy_core(**ROOM), [toy_request("plain", prompt)])
    core = toy_core(config(method, [[*prompt, *expected]]), **ROOM)
    assert run_all(core, [toy_request("a", prompt, **told(method, expected))]) == [expected]
    again = toy_request("b", prompt, **told(method, expected))
    assert run_all(core, [again]) == [expected]
    assert again.num_cached_tokens > 0
    assert_nothing_failed(core, method)


def survives_a_request_cancelled_in_mid_draft(method: str) -> None:
    expected = plain()
    core = toy_core(config(method, sequences(expected)), **ROOM)
    batch = requests(method, expected)
    for request in batch:
        core.add_request(request)
    for _ in range(3):
        core.step()
    core.abort("2")
    core.check_integrity()
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert [r.output_token_ids for i, r in enumerate(batch) if i != 2] == expected[:2] + expected[3:]
    assert core.kv.pool.num_free == core.kv.pool.num_blocks
    assert_nothing_failed(core, method)


def drafts_beside_every_other_method(method: str) -> None:
    """Requests that chose another method, or another size, in the same batch."""
    chosen = {name: {"method": name} for name, row in PROPOSERS.items() if row.per_request}
    choices: list[dict[str, Any]] = [{"off": True}, {"num_speculative_tokens": 2}, {"node_budget": 3}]
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    [expected] = run_all(toy_core(), [toy_request("x", prompt, max_tokens=16)])
    core = toy_core(config(method, [[*prompt, *expected]]), num_blocks=512, max_num_seqs=32)
    batch = [
        toy_request(str(i), prompt, max_tokens=16, speculative=choice)
        for i, choice in enumerate([*choices, *chosen.values()])
    ]
    for request in batch:
        core.speculator.check_request(request.sampling_params)
    assert run_all(core, batch) == [expected] * len(batch)
    assert {method, *chosen} <= set(core.speculator.stats())
    assert_nothing_failed(core, method)


def forgets_requests_that_are_gone(method: str) -> None:
    """Whatever a proposer maps request ids to is empty when no request is left."""
    expected = plain()
    core = toy_core(config(method, sequences(expected)), **ROOM)
    run_all(core, requests(method, expected))
    # The engine tells proposers about the last request with the next step.
    core.speculator.observe(StepContext([], gone=core._gone))
    ids = {str(i) for i in range(len(PROMPTS))}
    for proposer in core.speculator.proposers.values():
        for name, value in vars(proposer).items():
            if isinstance(value, dict | set):
                assert not ids & {key for key in value if isinstance(key, str)}, f"{method}.{name} keeps {value}"
    assert_nothing_failed(core, method)


def stays_inside_any_budget(method: str) -> None:
    """Odd contexts: one token, one value over and over, the vocabulary's last id; any room, any output so far."""

    @settings(max_examples=12, deadline=None, database=None, report_multiple_bugs=False)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
        num_output = data.draw(st.integers(0, len(tokens) - 1))
        max_tokens = num_output + data.draw(st.integers(1, 20))
        expected = [*tokens, *range(20)]
        core = toy_core(config(method, [expected]), **ROOM)
        start = len(tokens) - num_output
        request = toy_request("a", tokens[:start], max_tokens=max_tokens, **told(method, expected[start:]))
        request.token_ids += tokens[start:]
        reserve(core, request)
        for _ in range(3):
            [tree] = core.speculator.propose(StepContext([request]))
            assert max(tree.depths(), default=0) <= request.max_draft_depth
        assert_nothing_failed(core, method)
        most = core.speculator.max_nodes
        budget = Budget(data.draw(st.integers(0, most)), data.draw(st.integers(0, most)))
        trees = proposer_of(core, method).propose(StepContext([request]), [budget])
        check_trees(trees, [budget], VOCAB, method)

    if core_has_proposer(method):
        holds()


def drafts_nothing_for_an_empty_budget(method: str) -> None:
    """A budget of no nodes or of no depth, beside one with room."""
    if not core_has_proposer(method):
        return
    text = known_text(0, 3 * EOS)
    core = toy_core(config(method, [text]), decoder=KnownDecoder(), **ROOM)
    batch = [toy_request(name, text[: 2 * EOS], **told(method, text[2 * EOS :])) for name in "abc"]
    for request in batch:
        reserve(core, request)
    budgets = [Budget(0, 0), Budget(4, 4), Budget(0, 4)]
    trees = proposer_of(core, method).propose(StepContext(batch), budgets)
    check_trees(trees, budgets, VOCAB, method)
    assert not trees[0].token_ids and not trees[2].token_ids, f"{method} drafts for a budget of nothing"


def drafts_the_same_alone_and_in_a_batch(method: str) -> None:
    """From the requests alone, before any pass was seen. Not where measured time decides."""
    if PROPOSERS[method].by_time:
        return
    outputs = [list(range(10)) for _ in PROMPTS]
    together = fresh_trees(method, outputs, range(len(PROMPTS)))
    alone = [fresh_trees(method, outputs, [i])[0] for i in range(len(PROMPTS))]
    assert shapes(together) == shapes(alone), f"{method} drafts something else in a batch"


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top_k": {"temperature": 0.8, "top_k": 5},
}
EDITS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {3: 5.0, 4: -100.0}, "min_tokens": 6},
    "allowed_token_ids": {"allowed_token_ids": [1, 2, 3, 4, 5, 23], "min_p": 0.05},
    "top_p": {"top_p": 0.7, "stop_token_ids": [9]},
}

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        drafts_and_is_right_where_the_text_repeats,
        survives_preemption_and_chunked_prefill,
        survives_a_prefix_cache_hit,
        survives_a_request_cancelled_in_mid_draft,
        drafts_beside_every_other_method,
        forgets_requests_that_are_gone,
        stays_inside_any_budget,
        drafts_nothing_for_an_empty_budget,
        drafts_the_same_alone_and_in_a_batch,
    )
}
for sharpness, kind in ((0.5, "flat"), (6.0, "sharp")):
    for name, params in SAMPLING.items():
        RULES[f"writes_what_plain_decoding_writes, {kind}, {name}"] = functools.partial(
            writes_what_plain_decoding_writes, sharpness=sharpness, **params
        )
for name, params in EDITS.items():
    RULES[f"writes_what_plain_decoding_writes, {name}"] = functools.partial(
        writes_what_plain_decoding_writes, **{"temperature": 0.9, **params}
    )
