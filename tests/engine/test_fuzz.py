"""Requests with extreme options, and parts that raise, beside others: each gets an answer, or an error of its own."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import SamplingParams
from paceline.engine.core import EngineCore
from paceline.engine.job import Job
from paceline.engine.processor import Processor
from paceline.errors import PacelineError, RequestFailedError
from tests.engine.test_isolation import BREAKS, NEIGHBOUR_TOKENS, POISON, BrokenDrafter, RaisingDecoder
from tests.toy import EOS, VOCAB, ToyTokenizer, toy_core

MAX_LEN = 40
FRIENDS = [([1, 2, 3], {"temperature": 1.0, "seed": 5}), ([4, 5, 4, 5], {"temperature": 0.0, "logprobs": 2})]


def raises(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("processor")


def raises_late(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return logits if len(token_ids) < 7 else logits[1:]


def to_nan(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * math.nan


def to_nothing(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -math.inf)


EXTREMES = [
    0,
    0.0,
    -0.0,
    5e-324,
    1e-46,
    1e-38,
    1e-9,
    1e-5,
    1e-3,
    0.5,
    1,
    1.0,
    2,
    100,
    1e3,
    1e38,
    2**31 - 1,
    2**63,
    2**64,
]
NUMBERS = st.one_of(
    st.sampled_from(EXTREMES), st.sampled_from([-x for x in EXTREMES]), st.floats(), st.integers(-5, 40), st.none()
)
IDS = st.lists(st.one_of(st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1), st.sampled_from([-1, VOCAB, 2**70])))
TEXTS = st.lists(st.text("abcd ", max_size=3), max_size=5)
OPTIONS = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "max_tokens"), NUMBERS),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), NUMBERS),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), NUMBERS),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), st.booleans()),
    **dict.fromkeys(("stop", "bad_words"), TEXTS),
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids"), IDS),
    "n": st.sampled_from([1, 1, 1, 2, 3, 0, 129, None]),
    "logit_bias": st.dictionaries(st.integers(-1, VOCAB), NUMBERS, max_size=3),
    "logits_processors": st.lists(st.sampled_from([raises, raises_late, to_nan, to_nothing]), max_size=1),
    "speculative": st.sampled_from([None, {"off": True}, {"method": "ngram"}, {"prediction": [1, 2]}, {"x": 1}, {}]),
}
# A few at a time: with all of them nearly every request would be refused before it runs.
HOSTILE = st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: OPTIONS[name] for name in names})
)


def submit(core: EngineCore, name: str, prompt: Sequence[int], options: dict[str, Any]) -> Job:
    tokenizer = ToyTokenizer()
    processor = Processor(tokenizer, VOCAB, (EOS,), MAX_LEN, core.speculator.check_request)
    job = processor.job(name, list(prompt), SamplingParams(**options))
    for request in job.requests:
        job.states.append(core.add_request(request))
    return job


def neighbour(core: EngineCore, index: int) -> Job:
    prompt, options = FRIENDS[index]
    return submit(
        core, f"neighbour{index}", prompt, {"max_tokens": 14, "allowed_token_ids": NEIGHBOUR_TOKENS, **options}
    )


def run(core: EngineCore) -> None:
    for _ in range(1_000):
        if not core.has_requests:
            return
        core.step()
        core.check_integrity()
    raise AssertionError("a request never ends")


def answer(job: Job) -> Any:
    output = job.output()
    assert output.finished and output.error is None
    return [(one.text, one.token_ids, one.finish_reason, one.logprobs) for one in output.outputs]


def truths() -> list[Any]:
    found = []
    for index in range(len(FRIENDS)):
        core = toy_core()
        job = neighbour(core, index)
        run(core)
        found.append(answer(job))
    return found


TRUTHS = truths()


def raising_observer(step: object) -> None:
    raise KeyError("observer")


@pytest.mark.faults
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(HOSTILE, st.lists(st.integers(0, EOS - 1), min_size=1, max_size=9)), min_size=1, max_size=4),
    st.sampled_from([None, None, "ngram", "suffix", "auto", "layer_skip", *BREAKS]),
    st.booleans(),
    st.booleans(),
)
def test_every_request_gets_an_answer_or_an_error_of_its_own(
    victims: list[tuple[dict[str, Any], list[int]]], drafter: str | None, poison: bool, observed: bool
) -> None:
    method = "ngram" if drafter in BREAKS else drafter
    core = toy_core(None if method is None else {"method": method}, num_blocks=40)
    if drafter in BREAKS:
        core.speculator._proposers["ngram"] = BrokenDrafter(drafter)  # type: ignore[assignment]
    if poison:
        core._text_decoder = RaisingDecoder()
    if observed:
        core.observers.append(raising_observer)
    jobs = []
    neighbours = [neighbour(core, 0)]
    for number, (options, prompt) in enumerate(victims):
        try:
            jobs.append(submit(core, f"victim{number}", prompt, options))
        except PacelineError:
            core.check_integrity()
    neighbours.append(neighbour(core, 1))
    run(core)
    assert [answer(job) for job in neighbours] == TRUTHS
    assert core.kv.pool.num_free == core.kv.pool.num_blocks
    for job in jobs:
        output = job.output()
        assert output.finished
        for state in job.states:
            request = state.request
            assert (request.finish_reason == "error") == isinstance(request.error, RequestFailedError)
            assert request.error is not None or request.finish_reason in ("stop", "length")
            assert len(request.token_sources) == request.num_output_tokens <= request.max_tokens
            assert not poison or request.error is not None or POISON not in request.output_token_ids[:-1]
