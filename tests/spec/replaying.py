"""A target that says what it is told to: drafts are verified against a known output, without a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.request import Request, RequestStatus
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import DraftTree
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import RequestPass, StepContext
from paceline.spec.speculator import Speculator


class Letters:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


SERVICES = EngineParts(vocab_size=50_000, max_model_len=8192, tokenizer=Letters())


def speculator(config: Mapping[str, Any]) -> Speculator:
    return Speculator(config, SERVICES)


def request(tokens: Sequence[int], request_id: str = "a", max_tokens: int = 10_000, speculative: Any = None) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculative=speculative)
    return Request(request_id, list(tokens), params, max_tokens, seed=0)


def draft(config: Mapping[str, Any], tokens: Sequence[int]) -> DraftTree:
    """The first tree for a request of these tokens."""
    [tree] = speculator(config).propose(StepContext([request(tokens)]))
    return tree


def accept(tree: DraftTree, truth: Sequence[int]) -> tuple[list[int], list[int]]:
    """(accepted nodes, emitted tokens) when the target goes on with `truth`."""
    children, at = tree.children(), -1
    accepted: list[int] = []
    for i, token in enumerate(truth):
        child = children[at].get(token)
        if child is None:
            return accepted, list(truth[: i + 1])
        accepted.append(child)
        at = child
    return accepted, list(truth)


def replay(
    spec: Speculator,
    prompt: Sequence[int],
    output: Sequence[int],
    request_id: str = "a",
    speculative: Any = None,
) -> list[int]:
    """Run one request to its end; how many tokens each step emitted, the first (prefill) step included."""
    job = request(prompt, request_id, len(output), speculative)
    job.token_ids.append(output[0])
    last = RequestPass(job, range(1), 0, len(prompt), new_token_ids=[output[0]], logits_row=0)
    last.counts.count(last.draft, [], 1)
    emitted = [1]
    while job.num_output_tokens < len(output):
        step = StepContext([job], [last])
        spec.observe(step)
        [tree] = spec.propose(step)
        accepted, new = accept(tree, output[job.num_output_tokens :])
        start = job.num_tokens - 1
        job.token_ids += new
        last = RequestPass(
            job, range(1 + len(tree)), start, 1, tree, accepted[: len(new)], new_token_ids=new, logits_row=0
        )
        last.counts.count(tree, accepted, len(new))
        emitted.append(len(new))
    job.status = RequestStatus.FINISHED
    spec.observe(StepContext([], [last], [job]))
    return emitted


def tokens_per_step(emitted: Sequence[int]) -> float:
    return sum(emitted) / len(emitted)
