"""Whatever is given for an option is turned into a plain value or refused, when the object is made."""

import copy
import dataclasses
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.foreign_options import SAMPLING
from paceline.core.outputs import RequestOutputKind
from paceline.core.request import Request
from paceline.core.sampling_params import GREEDY_BELOW, SamplingParams
from paceline.errors import InvalidOptionError
from paceline.ops.sampling import NodeRow, choose_tokens, row_probs

FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if field.init]


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


STRANGE: list[Any] = [
    None, math.nan, math.inf, -math.inf, True, False, 0, 1, -1, 0.5, 5e-324, 1e-46, -0.0, 10**400, 10**5000,
    -(10**5000),
    np.float32(0.5), np.float64("nan"), np.int64(1), np.bool_(True), np.array([1, 2]), np.array([[1]]), np.array(1),
    torch.tensor(1), "", "1", "text", b"bytes", 1j, Decimal("0.5"), Fraction(1, 2), object(), Unshowable(), int, len,
    [], [[]], [None], [""], ["a", 3], [1.5], [True], [np.int64(3)], [10**5000], [math.nan], ["x" * 10**6],
    (1, 1), {1, 2}, range(3), iter([1]), {}, {"a": 1}, {1: None}, {1: math.nan}, {1: "2"}, {1: 1e-46}, {1.5: 1.0},
    {True: 1.0},
    {10**5000: 1.0}, {None: None}, {"off": True}, {1: 10**400}, [len],
]  # fmt: skip


def is_plain(value: object) -> bool:
    """Made of Python's own values, and finite."""
    if isinstance(value, tuple):
        return all(is_plain(one) for one in value)
    if type(value) is dict:
        return all(is_plain(one) for one in value)
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (int, bool, str, RequestOutputKind) or callable(value)


@pytest.mark.parametrize("name", FIELDS)
def test_any_value_of_an_option_becomes_plain_or_is_refused(name: str) -> None:
    for value in STRANGE:
        try:
            params = SamplingParams(**{name: value})
        except InvalidOptionError as error:
            assert name in str(error) and len(str(error)) < 500
        else:
            assert is_plain(getattr(params, name)), (type(value), getattr(params, name))
            assert dataclasses.replace(params) == params


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"allowed_token_ids", "seed", "max_tokens", "logprobs"}))
def test_none_is_refused_where_it_means_nothing(name: str) -> None:
    default = getattr(SamplingParams(), name)
    # an empty list may be given as None, as in vLLM, and so may what has no effect
    if default is None or isinstance(default, tuple | dict) or name in SAMPLING:
        assert getattr(SamplingParams(**{name: None}), name) == default
    else:
        with pytest.raises(InvalidOptionError, match=f"{name} must be"):
            SamplingParams(**{name: None})


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 100.0), st.integers(0, 2**64 - 1))
def test_every_temperature_that_is_taken_can_be_sampled_with(temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed % 1000)) * 30
    row = NodeRow(Request("r", [1], params, max_tokens=4, seed=seed), (), 0)
    (token,) = choose_tokens([row], logits)
    assert isinstance(token, int)
    assert math.isclose(row_probs(row, logits).sum(), 1.0, rel_tol=1e-9)


@pytest.mark.parametrize("temperature", [1e-46, 5e-324, 1e-38, 1e-30, GREEDY_BELOW / 2])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy


def test_a_list_that_changes_afterwards_changes_nothing() -> None:
    stop, bias, ids, words = ["a"], {1: 1.0}, [3], ["bad"]
    choice = {"off": True}
    params = SamplingParams(
        stop=stop, logit_bias=bias, allowed_token_ids=ids, stop_token_ids=ids, bad_words=words, speculative=choice
    )
    for changing in (stop, ids, words):
        changing.append(None)  # type: ignore[attr-defined]
    bias[1] = math.nan
    choice["off"] = False
    assert params.stop == ("a",) and params.bad_words == ("bad",)
    assert params.allowed_token_ids == params.stop_token_ids == (3,)
    assert params.logit_bias == {1: 1.0} and params.speculative == {"off": True}


def test_options_may_be_assigned_and_are_checked_when_they_are() -> None:
    params = SamplingParams()
    params.temperature, params.stop, params.max_tokens = 0, "x", None
    assert params == SamplingParams(temperature=0.0, stop=["x"], max_tokens=None) and params.greedy
    with pytest.raises(InvalidOptionError, match="top_p"):
        params.top_p = 2.0
    with pytest.raises(AttributeError):
        params.temprature = 0.5  # type: ignore[attr-defined]
    assert params.top_p == 1.0


def test_what_was_submitted_stays_as_it_was_and_cannot_be_changed() -> None:
    params = SamplingParams(temperature=0.5)
    first = params.submitted()
    assert params.submitted() is first is first.submitted(), "many prompts share one copy"
    with pytest.raises(InvalidOptionError, match="clone"):
        first.temperature = 0.1
    params.temperature = 0.1
    second = params.submitted()
    assert (first.temperature, second.temperature) == (0.5, 0.1)
    again = first.clone()
    again.temperature = 0.2
    assert first.temperature == 0.5
    params.min_tokens = 99
    with pytest.raises(InvalidOptionError, match="min_tokens"):
        params.submitted()


def test_copies_and_pickles_are_equal_and_may_be_changed() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.0}).submitted()
    for copied in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert copied == params
        copied.top_k = 3
    assert params.top_k == 0


def test_from_optional_takes_none_for_a_default_and_text_for_token_ids() -> None:
    params = SamplingParams.from_optional(temperature=None, n=None, max_tokens=None, logit_bias={"5": 1000.0})
    assert params == SamplingParams(max_tokens=None, logit_bias={5: 100.0})
    assert SamplingParams.from_optional() == SamplingParams()


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidOptionError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
