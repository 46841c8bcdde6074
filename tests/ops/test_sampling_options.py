"""Every option against a plain reading of its definition, alone and mixed, at the root and on draft nodes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.bad_words import BadWords
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError, NothingToSampleError, RequestFailedError
from paceline.ops.sampling import NodeRow, _choose_on_device, check_sampling, choose_tokens, row_probs, target_probs
from paceline.ops.sampling_truncate import shortlist, truncated_scores

VOCAB = 12
EOS = 11


def request_of(params: SamplingParams, output: Sequence[int] = (), **kwargs: Any) -> Request:
    request = Request("r", [1, 2, 2], params, max_tokens=64, seed=3, eos_token_ids=(EOS,), **kwargs)
    request.token_ids += output
    return request


def by_definition(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], bad: Any
) -> list[float]:
    """The options one after the other, token by token, as the table in docs/sampling.md says."""
    x = list(logits)
    for t in range(VOCAB):
        if params.allowed_token_ids is not None and t not in params.allowed_token_ids:
            x[t] = -math.inf
        for word in bad:
            if word[-1] == t and list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
                x[t] = -math.inf
        held_back = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        if len(output) < params.min_tokens and t in held_back:
            x[t] = -math.inf
        x[t] += params.logit_bias.get(t, 0.0)
        if t in prompt or t in output:
            x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
        x[t] -= params.frequency_penalty * list(output).count(t)
        x[t] -= params.presence_penalty * (t in output)
    best = max(x)
    if params.temperature == 0.0:
        return [float(t == x.index(best)) for t in range(VOCAB)]
    weight = [math.exp((v - best) / params.temperature) for v in x]
    weight = [w if w >= params.min_p else 0.0 for w in weight]
    if params.top_k > 0:
        kth = sorted(weight, reverse=True)[min(params.top_k, VOCAB) - 1]
        weight = [w if w >= kth else 0.0 for w in weight]
    before, total = 0.0, sum(weight)
    for t in sorted(range(VOCAB), key=lambda t: (-weight[t], t)):
        likelier, before = before, before + weight[t]
        if likelier >= params.top_p * total:
            weight[t] = 0.0
    return [w / sum(weight) for w in weight]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_k": 100},
    {"top_k": -1},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"logit_bias": {0: 5.0, 7: -100.0}},
    {"allowed_token_ids": [2, 3, 5, EOS]},
    {"min_tokens": 3, "stop_token_ids": [4]},
    {"min_tokens": 3, "stop_token_ids": [4], "ignore_eos": True},
    {"temperature": 0.0, "logit_bias": {6: 30.0}},
    {"temperature": 0.0, "repetition_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 1.4, "top_k": 6, "top_p": 0.8, "min_p": 0.05, "frequency_penalty": 0.3, "logit_bias": {1: 1.0}},
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("output", [[], [4], [4, 4, 9, 1]], ids=str)
@pytest.mark.parametrize("num_draft", [0, 1, 3])
def test_options_by_definition(option: dict[str, Any], output: list[int], num_draft: int) -> None:
    """Output tokens and draft ancestors count alike, wherever the line between them is."""
    bad = ((4, 9, 1, 3), (5,), (9, 6))
    params = SamplingParams(max_tokens=64, **option)
    cut = max(0, len(output) - num_draft)
    request = request_of(params, output[:cut], bad_words=BadWords(bad))
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, 2, (3, VOCAB)).astype(np.float32)
        found = row_probs(NodeRow(request, tuple(output[cut:]), 1), torch.from_numpy(logits))
        expected = by_definition(logits[1].tolist(), params, [1, 2, 2], output, bad)
        assert np.abs(found - np.array(expected)).max() < 1e-5  # the reference computes in float64 throughout


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.floats(0.05, 5.0),
    st.integers(0, 40),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    st.sampled_from([0.1, 3.0, 30.0]),
    st.booleans(),
)
def test_the_fast_path_keeps_the_same_tokens_as_its_twin(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, ties: bool
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.random.default_rng(seed).normal(0, spread, 5000).astype(np.float32)
    logits[:100] = -np.inf
    if ties:
        logits = logits.round()
    check_twins(logits, params)


def check_twins(logits: Any, params: SamplingParams) -> None:
    ids, scores = shortlist(logits, params)
    (twin,) = truncated_scores(torch.from_numpy(logits)[None], [params]).numpy()
    own = np.full_like(twin, -np.inf)
    own[slice(None) if ids is None else ids] = scores
    assert np.array_equal(own, twin)


def test_12_temperature_ignored_on_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees a backend that leaves the temperature out."""
    logits = np.random.default_rng(0).normal(0, 1, 50).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_k=10)
    check_twins(logits, params)
    twin = truncated_scores
    monkeypatch.setitem(globals(), "truncated_scores", lambda x, p: twin(x, [SamplingParams(top_k=10)]))
    with pytest.raises(AssertionError):
        check_twins(logits, params)


def every_kind_of_row(vocab: int) -> list[tuple[Request, Any]]:
    generator = np.random.default_rng(0)
    kinds = [*OPTIONS, {"top_p": 0.95, "temperature": 2.0}, {"top_k": 50}, {}]
    requests = []
    for i, option in enumerate(kinds * 2):
        request = Request("r", [1, 2], SamplingParams(max_tokens=64, **option), max_tokens=64, seed=i)
        requests.append((request, generator.normal(0, 3, vocab).astype(np.float32)))
    return requests


def check_alone_and_together(compute: Any, vocab: int = 33_001) -> None:
    """A row's token and distribution may not depend on which rows share its batch, nor on its place there."""
    rows = every_kind_of_row(vocab)
    together = torch.from_numpy(np.stack([logits for _, logits in rows]))
    at_once = compute([NodeRow(request, (), i) for i, (request, _) in enumerate(rows)], together)
    for i, (request, logits) in enumerate(rows):
        (alone,) = compute([NodeRow(request, (), 0)], torch.from_numpy(logits)[None])
        assert np.array_equal(alone, at_once[i])


def test_13_rows_alone_and_together() -> None:
    def broken(rows: Sequence[NodeRow], logits: torch.Tensor) -> list[Any]:
        """Rounds differently when many rows are there, as kernels do that pick another tiling."""
        if len(rows) > 1:
            logits = logits.to(torch.bfloat16).float()
        return target_probs(rows, logits)

    check_alone_and_together(choose_tokens)
    check_alone_and_together(target_probs)
    with pytest.raises(AssertionError):
        check_alone_and_together(broken)


def rows_of_every_kind(vocab: int, device: str) -> tuple[list[NodeRow], torch.Tensor]:
    """Also one row that fails before it is sampled, and one with unusable logits."""
    kinds = every_kind_of_row(vocab)
    kinds.append((request_of(SamplingParams(logits_processors=[raising])), kinds[0][1]))
    kinds.append((request_of(SamplingParams()), np.full(vocab, np.nan, dtype=np.float32)))
    logits = torch.from_numpy(np.stack([row for _, row in kinds])).to(device)
    return [NodeRow(request, (), i) for i, (request, _) in enumerate(kinds)], logits


def check_device(device: str) -> None:
    """All rows at once on a device choose what the host chooses row by row."""
    rows, logits = rows_of_every_kind(5_000, device)
    before = logits.clone()
    found, expected = _choose_on_device(rows, logits), choose_tokens(rows, logits.cpu())
    assert [str(token) for token in found] == [str(token) for token in expected]
    assert torch.equal(logits, before) or (torch.isnan(logits) == torch.isnan(before)).all()


def test_the_device_path_chooses_what_the_host_chooses() -> None:
    check_device("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_chooses_what_the_host_chooses() -> None:
    check_device("cuda")


@pytest.mark.parametrize("option", [{}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 4, "min_p": 0.05}], ids=str)
def test_tokens_are_drawn_from_the_distribution(option: dict[str, Any]) -> None:
    """Chi-square of 6,000 draws, one per seed; fails by chance with odds of 1e-4 per case."""
    from scipy import stats

    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1.5, VOCAB).astype(np.float32))[None]
    params = SamplingParams(**option)
    request = request_of(params)
    p = row_probs(NodeRow(request, (), 0), logits)
    counts = np.zeros(VOCAB)
    for seed in range(6_000):
        request.seed = seed
        (token,) = choose_tokens([NodeRow(request, (), 0)], logits)
        assert isinstance(token, int)
        counts[token] += 1
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], 6_000 * p[p > 0]).pvalue > 1e-4


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 7]] = 1.0
    assert choose_tokens([NodeRow(request_of(SamplingParams(temperature=0.0)), (), 0)], logits) == [4]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_fail_their_own_row_alone(value: float, temperature: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 5] = value
    params = SamplingParams(temperature=temperature)
    first, second, third = choose_tokens([NodeRow(request_of(params), (), i) for i in range(3)], logits)
    assert isinstance(second, RequestFailedError) and "largest logit" in str(second)
    assert isinstance(first, int) and first == third


def test_a_row_with_nothing_left_says_so() -> None:
    params = SamplingParams(allowed_token_ids=[4, EOS], min_tokens=1)
    request = request_of(params, bad_words=BadWords([(4,)]))
    (answer,) = choose_tokens([NodeRow(request, (), 0)], torch.zeros(1, VOCAB))
    assert isinstance(answer, RequestFailedError) and "left no token" in str(answer)


def test_options_that_leave_nothing_are_told_from_a_model_that_gives_nothing() -> None:
    """The caller can correct the first, not the second."""
    params = SamplingParams(allowed_token_ids=[4, 5])
    for temperature in (0.0, 1.0):
        params = dataclasses.replace(params, temperature=temperature)
        row = NodeRow(request_of(params, bad_words=BadWords([(4,), (5,)])), (), 0)
        for value in (0.0, math.nan, math.inf, -math.inf):
            for choose in (choose_tokens, _choose_on_device, target_probs):
                (answer,) = choose([row], torch.full((1, VOCAB), value))
                assert isinstance(answer, RequestFailedError)
                assert isinstance(answer, NothingToSampleError) == (value == 0.0)


def strange_processor(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(logits.shape, device="meta")


@pytest.mark.parametrize("choose", [choose_tokens, _choose_on_device, target_probs])
def test_any_exception_while_sampling_fails_its_own_row_alone(choose: Any) -> None:
    rows = [NodeRow(request_of(SamplingParams()), (), i) for i in range(3)]
    rows[1] = NodeRow(request_of(SamplingParams(logits_processors=[strange_processor])), (), 1)
    logits = torch.zeros(3, VOCAB)
    first, second, third = choose(rows, logits)
    assert isinstance(second, RequestFailedError) and not isinstance(second, NothingToSampleError)
    assert np.array_equal(first, choose(rows[:1], logits)[0]) and np.array_equal(third, choose(rows[2:], logits)[0])


def test_processors_get_the_tokens_before_the_node() -> None:
    seen: list[list[int]] = []

    def processor(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(token_ids))
        return logits + torch.nn.functional.one_hot(torch.tensor(3), VOCAB) * 50

    request = request_of(SamplingParams(logits_processors=[processor]), [7])
    original = torch.zeros(1, VOCAB)
    assert choose_tokens([NodeRow(request, (8, 9), 0)], original) == [3]
    assert seen == [[1, 2, 2, 7, 8, 9]]
    assert not original.any()


def raising(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such state")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (raising, "no such state"),
        (lambda token_ids, logits: logits[:3], r"shape \(12,\), it returned \(3,\)"),
        (lambda token_ids, logits: None, "it returned NoneType"),
    ],
)
def test_a_failing_processor_fails_its_request(processor: Any, message: str) -> None:
    request = request_of(SamplingParams(logits_processors=[processor]))
    (answer,) = choose_tokens([NodeRow(request, (), 0)], torch.zeros(1, VOCAB))
    with pytest.raises(RequestFailedError, match=message):
        raise answer  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias names token 12"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must hold token ids"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids names token 99"),
        ({"stop_token_ids": [True]}, "stop_token_ids must hold token ids"),
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 2}, "holds only stop tokens"),
        ({"logits_processors": ["uppercase"]}, "must be callables"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        check_sampling(SamplingParams(**option), VOCAB)


@pytest.mark.parametrize(
    ("option", "banned"),
    [
        ({"allowed_token_ids": [3, 4]}, {3, 4}),
        ({"allowed_token_ids": [3, EOS], "min_tokens": 1}, {3}),
        ({"allowed_token_ids": [3, 5], "min_tokens": 1, "stop_token_ids": [5]}, {3}),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, set()),
        ({}, set(range(VOCAB))),
        ({"min_tokens": 1}, set(range(VOCAB)) - {EOS}),
        ({"logit_bias": {3: 100.0}, "allowed_token_ids": [3]}, {3}),
    ],
)
def test_options_that_can_leave_no_token_are_refused_before_they_run(option: dict[str, Any], banned: set[int]) -> None:
    with pytest.raises(InvalidOptionError, match="nothing could be sampled"):
        check_sampling(SamplingParams(**option), VOCAB, (EOS,), banned)


@pytest.mark.parametrize(
    ("option", "banned"),
    [
        ({"allowed_token_ids": [3, 4]}, {3}),
        ({"allowed_token_ids": [3, EOS], "min_tokens": 1, "ignore_eos": True}, {3}),
        ({"allowed_token_ids": [3, EOS]}, {3}),
        ({"min_tokens": 1}, set(range(VOCAB)) - {EOS, 2}),
        ({"logit_bias": {3: -100.0}, "allowed_token_ids": [3]}, set()),
    ],
)
def test_options_that_leave_one_token_pass_and_can_be_sampled(option: dict[str, Any], banned: set[int]) -> None:
    params = SamplingParams(**option)
    check_sampling(params, VOCAB, (EOS,), banned)
    row = NodeRow(request_of(params, bad_words=BadWords([(token,) for token in banned])), (), 0)
    assert isinstance(choose_tokens([row], torch.zeros(1, VOCAB))[0], int)


def test_ids_inside_the_vocabulary_pass() -> None:
    check_sampling(SamplingParams(logit_bias={0: 1.0}, allowed_token_ids=[VOCAB - 1], stop_token_ids=[3]), VOCAB)


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"logit_bias": {1: 101.0}},
    {"logit_bias": {1: math.nan}},
    {"allowed_token_ids": []},
    {"seed": 2**64},
    {"seed": 1.5},
    {"n": 0},
    {"max_tokens": 0},
    {"min_tokens": -1},
    {"min_tokens": 20},
    {"stop": ""},
    {"stop": [3]},
    {"logprobs": -2},
    {"logprobs": 10**6},
    {"prompt_logprobs": -2},
]


@pytest.mark.parametrize("option", OUT_OF_RANGE, ids=str)
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(InvalidOptionError, match=name):
        SamplingParams(**option)


def test_a_temperature_near_zero_is_greedy_and_does_not_overflow() -> None:
    params = SamplingParams(temperature=1e-30, top_k=3, top_p=0.9)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 10
    assert row_probs(NodeRow(request_of(params), (), 0), logits)[int(logits.argmax())] == 1.0


def test_what_requests_brought_is_not_kept_for_ever() -> None:
    from paceline.ops import sampling_edits
    from paceline.ops.sampling_edits import _distinct, _OncePer

    few: _OncePer[list[int], np.ndarray] = _OncePer(_distinct)
    kept = [few([i]) for i in range(3 * sampling_edits.MAX_REMEMBERED)]
    assert len(few) == sampling_edits.MAX_REMEMBERED and len(kept) == 3 * len(few)
    large: _OncePer[list[int], np.ndarray] = _OncePer(_distinct)
    for _ in range(100):
        large(list(range(100_000)))
    assert len(large) <= sampling_edits.MAX_REMEMBERED_BYTES // 800_000
    prompt = [3, 1, 3]
    assert large(prompt) is large(prompt)
