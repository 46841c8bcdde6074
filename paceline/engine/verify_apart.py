"""Verification in which one request's failure is its own.

All requests are verified together. Where that raises, nothing says whose fault it is, so they are verified one by one;
a request that fails alone is verified without its draft, which never matters to the output, and fails only then.
"""

import logging
from collections.abc import Sequence

from torch import Tensor

from paceline.core.faults import request_error
from paceline.core.outputs import VerifyResult
from paceline.core.tree import EMPTY_TREE
from paceline.engine.scheduler import ScheduledRequest
from paceline.ops.sampling import token_logprobs
from paceline.verifiers.verifier import Verifier

logger = logging.getLogger("paceline")


def verify_apart(
    verifier: Verifier,
    entries: Sequence[ScheduledRequest],
    logits: Tensor,  # [sum(1 + nodes), vocab]
) -> list[VerifyResult]:
    try:
        return _verify(verifier, entries, logits)
    except BaseException as error:
        request_error("verification", error)  # raises where it is about more than a request
        logger.exception("verification of %d requests failed: each is verified alone", len(entries))
    results: list[VerifyResult] = []
    begin = 0
    for entry in entries:
        end = begin + 1 + len(entry.draft)
        results.append(_verify_alone(verifier, entry, logits[begin:end]))
        begin = end
    return results


def _verify(verifier: Verifier, entries: Sequence[ScheduledRequest], logits: Tensor) -> list[VerifyResult]:
    results = verifier.verify([entry.request for entry in entries], [entry.draft for entry in entries], logits)
    if len(results) != len(entries):
        raise ValueError(f"{verifier.name} gave {len(results)} results for {len(entries)} requests")
    return results


def _verify_alone(verifier: Verifier, entry: ScheduledRequest, logits: Tensor) -> VerifyResult:
    plain = ScheduledRequest(entry.request, entry.start, entry.num_committed, EMPTY_TREE)
    for one, rows in ((entry, logits), (plain, logits[:1])):
        try:
            return _verify(verifier, [one], rows)[0]
        except BaseException as raised:
            error = request_error("verification", raised)
    return VerifyResult([], [], error=error)


def record_prompt_logprobs(entry: ScheduledRequest, logits: Tensor) -> VerifyResult | None:
    """Row at position p says how likely prompt token p + 1 was; the first token has no row before it.

    A result only where the request cannot go on."""
    request = entry.request
    top = request.sampling_params.prompt_logprobs
    assert request.prompt_logprobs is not None and top is not None
    begin = entry.start + 1
    targets = request.prompt_token_ids[begin : begin + logits.shape[0]]
    known = len(request.prompt_logprobs)  # rows computed again after a preemption say nothing new
    try:
        new = token_logprobs(logits[: len(targets)], targets, top)
    except BaseException as raised:
        return VerifyResult([], [], error=request_error("computing log-probabilities of the prompt", raised))
    request.prompt_logprobs.extend(new[known - begin :])
    return None
