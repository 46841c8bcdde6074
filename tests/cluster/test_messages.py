"""Requests and outputs through JSON and back: nothing is lost, and no bit of a log-probability changes."""

import json
import math
from typing import Any

import pytest

from paceline.cluster.messages import (
    decode_error,
    decode_output,
    decode_params,
    encode_error,
    encode_output,
    encode_params,
)
from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidOptionError, InvalidRequestError, NothingToSampleError, RequestFailedError


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=2**64 - 1, max_tokens=None),
        SamplingParams(stop=["a", "ü"], stop_token_ids=[3], bad_words=["x"], logit_bias={5: -3.5}, min_tokens=2),
        SamplingParams(logprobs=-1, prompt_logprobs=2, allowed_token_ids=[1, 2], repetition_penalty=1.2),
        SamplingParams(speculative={"method": "ngram", "num_speculative_tokens": 4}, ignore_eos=True),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"})),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])),
    ],
)
def test_sampling_params_come_back_as_they_went(params: SamplingParams) -> None:
    assert decode_params(through_json(encode_params(params))) == params


def test_functions_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="functions of one process"):
        encode_params(SamplingParams(logits_processors=[lambda tokens, logits: logits]))


def test_an_output_comes_back_as_it_went() -> None:
    logprobs = [TokenLogprobs(5, -0.1, 1, {5: -0.1, 7: -math.inf}), TokenLogprobs(6, -1e-17 / 3, 2, {})]
    sample = CompletionOutput(1, "text ü", [5, 6], "stop", "\n", logprobs, ["ngram", "bonus"], -0.1)
    counts = DraftCounts(4, 3, [2, 1], 2, 5, 8, {"a": DraftCounts(4, 3, [2, 1], 2)})
    metrics = RequestMetrics(10, 3, counts, 0.1, 0.2, None, 0.3, draft_s=0.01, num_preemptions=1)
    output = RequestOutput("r", None, [1, 2], [sample], True, metrics, [None, logprobs[0]], None, 3)
    item = through_json(encode_output(output, [4]))
    assert item["outputs"][0]["offset"] == 4
    assert decode_output(item, "r", [1, 2], None) == output


def test_an_error_comes_back_as_its_class() -> None:
    for error in (InvalidRequestError("a"), InvalidOptionError("b"), NothingToSampleError("c")):
        back = decode_error(through_json(encode_error(error)))
        assert type(back) is type(error) and str(back) == str(error)
    assert type(decode_error(encode_error(ZeroDivisionError("d")))) is RequestFailedError
    output = RequestOutput("r", None, [1], [], True, error=RequestFailedError("e"))
    assert isinstance(decode_output(through_json(encode_output(output, [])), "r", [1], None).error, RequestFailedError)
