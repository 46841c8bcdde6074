"""Options and endings inside an accepted block, on the toy engine: always what plain decoding gives.

17 EOS, a stop token, a stop string or the length limit inside a block, and 11 and 20 once more through the engine. Each
check is also asked of an engine with the bug in it, and must see it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.core.bad_words import BadWords
from paceline.core.outputs import VerifyResult
from paceline.core.request import Request
from paceline.engine.core import EngineCore
from paceline.engine.request_state import RequestState
from paceline.ops import sampling
from paceline.ops.sampling import NodeRow
from paceline.ops.sampling_types import FloatRow
from tests.toy import EOS, VOCAB, run_all, toy_core, toy_request

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 12},
    {"repetition_penalty": 1.4},
    {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 5: -20.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 4, 6, 9, 13, EOS]},
    {"temperature": 1.0, "min_tokens": 9},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [2, 7]},
    {"temperature": 1.0, "min_tokens": 9, "ignore_eos": True, "stop_token_ids": [2, 7]},
    {"temperature": 1.0, "stop_token_ids": [0, 1, 2, 3]},
    {"temperature": 1.0, "stop": ["ab", "c", "dq", "m"]},
    {"temperature": 1.0, "stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 3},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.0, "logits_processors": [lambda token_ids, logits: logits.roll(len(token_ids) % 5)]},
]
ENDS_SOON_AFTER = {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": list(range(12))}
LENGTHS = (1, 2, 5, 9, 16)
SHAPES: list[Any] = ["chain", (3, 2, 1, 1), "random"]


def name(options: dict[str, Any]) -> str:
    """The same in every process: a function's own text would hold its address."""
    return str({key: "a function" if key == "logits_processors" else value for key, value in options.items()})


def requests_of(options: dict[str, Any]) -> list[Request]:
    generator = np.random.default_rng(0)
    requests = []
    for i in range(12):
        prompt = generator.integers(0, VOCAB - 1, size=generator.integers(1, 12)).tolist()
        length = max(LENGTHS[i % len(LENGTHS)], options.get("min_tokens", 0))
        requests.append(toy_request(f"r{i}", prompt, max_tokens=length, seed=i, **options))
        requests[-1].bad_words = BadWords([(5, 6), (8,)])
        if options.get("logprobs") is not None:
            requests[-1].logprobs = []
    return requests


def everything(core: EngineCore, requests: list[Request]) -> list[tuple[Any, ...]]:
    """All that a caller can see of each request."""
    states = [core.add_request(request) for request in requests]
    while core.has_requests:
        core.step()
        core.check_integrity()
    return [
        (
            s.request.output_token_ids,
            s.detokenizer.text,
            s.request.finish_reason,
            s.request.stop_reason,
            s.request.logprobs,
        )
        for s in states
    ]


def check(options: dict[str, Any], shape: Any, break_it: Callable[[EngineCore], None] = lambda core: None) -> None:
    plain = [everything(toy_core(), [request])[0] for request in requests_of(options)]
    longer = requests_of(options | {"ignore_eos": True, "stop": (), "stop_token_ids": (), "min_tokens": 0})
    for request in longer:
        request.max_tokens = 24  # so that the draft knows what would come after the end
    futures = run_all(toy_core(), longer)
    sequences = [request.prompt_token_ids + future for request, future in zip(longer, futures, strict=True)]
    sequences += [r.prompt_token_ids + seen[0] for r, seen in zip(longer, plain, strict=True)]
    oracle = {"method": "oracle", "sequences": sequences, "accuracy": 0.9, "shape": shape, "node_budget": 24}
    core = toy_core(oracle | {"num_speculative_tokens": 6})
    break_it(core)
    assert everything(core, requests_of(options)) == plain


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, ENDS_SOON_AFTER], ids=name)
def test_blocks_are_what_plain_decoding_gives(options: dict[str, Any], shape: Any) -> None:
    check(options, shape)


APPEND = RequestState._append


def never_looks_inside_a_block(state: RequestState, result: VerifyResult) -> int:
    """Bug 17: only the last token of a block is looked at, for EOS, stop tokens, stop strings and the length."""
    state.request.token_ids += result.token_ids[:-1]
    for token in result.token_ids[:-1]:
        state.detokenizer.append(token)
    return len(result.token_ids) - 1 + APPEND(state, VerifyResult(result.token_ids[-1:], [], None, result.error))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[10], OPTIONS[11]], ids=name)
def test_17_an_ending_inside_a_block_that_is_not_looked_for(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def patch(core: EngineCore) -> None:
        monkeypatch.setattr(RequestState, "_append", never_looks_inside_a_block)

    with pytest.raises(AssertionError):
        check(options, "chain", patch)


@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[4], ENDS_SOON_AFTER], ids=name)
def test_11_and_20_draft_ancestors_left_out(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """min_tokens and penalties that take a node for the root: seen through the engine as well."""
    edit, needs = sampling.edit_logits, sampling.needs_edit

    def broken(row: NodeRow, logits: FloatRow) -> FloatRow:
        return edit(NodeRow(row.request, (), row.logits_row), logits)

    def patch(core: EngineCore) -> None:
        monkeypatch.setattr(sampling, "edit_logits", broken)
        monkeypatch.setattr(sampling, "needs_edit", lambda row: needs(NodeRow(row.request, (), row.logits_row)))

    with pytest.raises(AssertionError):
        check(options, "chain", patch)


def test_a_failing_request_does_not_touch_the_others() -> None:
    good = requests_of({"temperature": 1.0})
    expected = run_all(toy_core(), good)
    bad = [
        toy_request("nothing left", [1, 2], allowed_token_ids=[4], logit_bias={4: -100.0}, logits_processors=[forbid]),
        toy_request("raises", [3, 4], logits_processors=[explode]),
    ]
    core = toy_core()
    mixed = requests_of({"temperature": 1.0})
    outputs = run_all(core, [*mixed[:6], *bad, *mixed[6:]])
    assert outputs[:6] + outputs[8:] == expected
    assert [request.finish_reason for request in bad] == ["error", "error"]
    assert "left no token" in str(bad[0].error) and "explode" in str(bad[1].error)


def forbid(token_ids: Any, logits: Any) -> Any:
    return logits - np.inf


def explode(token_ids: Any, logits: Any) -> Any:
    raise ValueError("as it should")
