"""Requests and outputs as JSON values, for frames between the server and its workers.

Floats come back with the same bits (JSON in Python writes the shortest text that reads back the same), so
log-probabilities do not change on the way. An error comes back as the class of `paceline.errors` that it was, so that
the server answers a client as it would without a cluster.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paceline import errors
from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.core.tokenizer import Tokenizer
from paceline.errors import InvalidRequestError, PacelineError, RequestFailedError

_DEFAULT = SamplingParams()
_OPTIONS = [field.name for field in dataclasses.fields(SamplingParams) if field.init]
_LEFT_OUT = ("output_kind", "logits_processors", "logit_bias", "structured_outputs")


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """Options that differ from their defaults."""
    if params.logits_processors:
        raise InvalidRequestError("logits_processors are functions of one process: a cluster cannot send them")
    values = dict(params.__reduce__()[1][0])
    found = {name: values[name] for name in _OPTIONS if name not in _LEFT_OUT and values[name] != _DEFAULTS[name]}
    if params.logit_bias:
        found["logit_bias"] = list(params.logit_bias.items())
    if params.structured_outputs is not None:
        given = dataclasses.asdict(params.structured_outputs)
        found["structured_outputs"] = {name: value for name, value in given.items() if value is not None}
    return found


_DEFAULTS: Mapping[str, Any] = dict(_DEFAULT.__reduce__()[1][0])


def decode_params(values: Mapping[str, Any]) -> SamplingParams:
    options = dict(values)
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): float(bias) for token, bias in options["logit_bias"]}
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    return SamplingParams(**options)


def encode_output(output: RequestOutput, offsets: Sequence[int]) -> dict[str, Any]:
    """A delta. `offsets`: how many output tokens of each of its samples stand before it."""
    item: dict[str, Any] = {
        "cached": output.num_cached_tokens,
        "outputs": [_encode_sample(one, offset) for one, offset in zip(output.outputs, offsets, strict=True)],
    }
    if output.finished:
        item["finished"] = True
    if output.metrics is not None:
        item["metrics"] = _encode_metrics(output.metrics)
    if output.prompt_token_logprobs is not None:
        item["prompt_logprobs"] = [
            None if one is None else _encode_logprobs(one) for one in output.prompt_token_logprobs
        ]
    if output.error is not None:
        item["error"] = encode_error(output.error)
    return item


def decode_output(
    item: Mapping[str, Any], request_id: str, prompt_token_ids: list[int], tokenizer: Tokenizer | None
) -> RequestOutput:
    prompt_logprobs = item.get("prompt_logprobs")
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=prompt_token_ids,
        outputs=[_decode_sample(one, tokenizer) for one in item["outputs"]],
        finished=item.get("finished", False),
        metrics=_decode_metrics(item["metrics"]) if "metrics" in item else None,
        prompt_token_logprobs=prompt_logprobs
        and [None if one is None else _decode_logprobs(one) for one in prompt_logprobs],
        error=decode_error(item["error"]) if "error" in item else None,
        num_cached_tokens=item["cached"],
        tokenizer=tokenizer,
    )


def _encode_sample(sample: CompletionOutput, offset: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": sample.index,
        "offset": offset,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "sources": sample.token_sources,
    }
    if sample.finish_reason is not None:
        found["end"] = [sample.finish_reason, sample.stop_reason]
    if sample.token_logprobs is not None:
        found["logprobs"] = [_encode_logprobs(one) for one in sample.token_logprobs]
        found["cumulative"] = sample.cumulative_logprob
    return found


def _decode_sample(values: Mapping[str, Any], tokenizer: Tokenizer | None) -> CompletionOutput:
    finish_reason, stop_reason = values.get("end", (None, None))
    logprobs = values.get("logprobs")
    return CompletionOutput(
        index=values["index"],
        text=values["text"],
        token_ids=values["token_ids"],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        token_logprobs=None if logprobs is None else [_decode_logprobs(one) for one in logprobs],
        token_sources=values["sources"],
        cumulative_logprob=values.get("cumulative"),
        tokenizer=tokenizer,
    )


def _encode_logprobs(one: TokenLogprobs) -> list[Any]:
    return [one.token_id, one.logprob, one.rank, list(one.top.items())]


def _decode_logprobs(values: Sequence[Any]) -> TokenLogprobs:
    token_id, logprob, rank, top = values
    return TokenLogprobs(token_id, logprob, rank, {int(token): value for token, value in top})


def _encode_metrics(metrics: RequestMetrics) -> dict[str, Any]:
    found = {field.name: value for field, value in zip(_METRICS, _metric_values(metrics), strict=True)}
    found["counts"] = dataclasses.asdict(metrics.counts)
    return found


_METRICS = [field for field in dataclasses.fields(RequestMetrics) if field.name != "counts"]


def _metric_values(metrics: RequestMetrics) -> list[Any]:
    values = dataclasses.asdict(metrics)
    return [values[field.name] for field in _METRICS]


def _decode_metrics(values: Mapping[str, Any]) -> RequestMetrics:
    return RequestMetrics(**{**values, "counts": DraftCounts.from_dict(values["counts"])})


def encode_error(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


_ERRORS = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, PacelineError)
}


def decode_error(values: Sequence[str]) -> PacelineError:
    """What is not one of ours failed inside the worker, for this request."""
    name, message = values
    kind = _ERRORS.get(name, RequestFailedError)
    return RequestFailedError(message) if kind is errors.MissingExtraError else kind(message)
