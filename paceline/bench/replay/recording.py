"""What the target really said, kept for replay: prompts, outputs, and its likeliest tokens after every row verified.

One JSON line per request. Drafters that look only at tokens need no more than the output. Token recycling learns from
the target's likeliest tokens, after rejected nodes too: a recording made while recycling drafts holds both, in the
order in which recycling would see them where requests were answered one after the other. A merged tree has other nodes,
so the requests are answered once more while `merge` drafts (`joined`).

What a drafter with a network would say cannot be computed without it, so it is kept too: the drafter is asked at every
place of the answer, and none of its drafts is verified (`record_drafts`). At each place it has then seen what it would
have seen in any other run: the tokens before, and their hidden states.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.bench.run.backend import Sampling
from paceline.bench.run.engine_backend import asked, sampling_params
from paceline.bench.workloads.workload import Prompt
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import InvalidOptionError, PacelineError
from paceline.llm import LLM
from paceline.spec.model.top_tokens import top_tokens
from paceline.spec.proposer import RequestPass, StepContext
from paceline.spec.speculator import Speculator

NUM_TOP_TOKENS = 8
RECORDED_WITH = ("recycling", "merge")  # methods that draft while requests are answered for a recording, in turn

Note = tuple[int, list[int], list[int]]
Drafted = tuple[list[int], list[int], list[float]]  # a tree's tokens, parents and confidence


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request: what was asked and what the target answered."""

    prompt_id: str
    category: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    top_token_ids: list[list[int]]  # [output position][rank]: the target's likeliest tokens there
    temperature: float
    vocab_size: int
    seed: int = 0
    rejected: list[Note] = field(default_factory=list)
    """(output position, path, the target's likeliest tokens after it) of nodes that were verified and not accepted. The
    path begins with the token that stood, wrongly, at that position."""
    drafted: dict[str, list[Drafted]] = field(default_factory=dict)
    """Method -> its draft at each output position; nothing before the first token, which the prompt's pass emits."""


def record(llm: LLM, prompts: Sequence[Prompt], sampling: Sampling) -> list[Recorded]:
    """Run the prompts (together, as the engine batches them) and keep what the target said.

    An engine that drafts with `recycling`, one request after the other, leaves the richest recording."""
    params = [
        replace(sampling_params(sampling, i, prompt), logprobs=NUM_TOP_TOKENS) for i, prompt in enumerate(prompts)
    ]
    questions = [asked(prompt, llm.get_tokenizer()) for prompt in prompts]
    vocab_size = llm.engine.model.decoder.config.vocab_size
    recorded = []
    rejected: dict[str, list[Note]] = defaultdict(list)
    with _rejected_nodes_kept(llm.engine.core.speculator, rejected):
        outputs = llm.generate(questions, params)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if output.error is not None:
            raise output.error
        completion = output.outputs[0]
        assert completion.token_logprobs is not None
        recorded.append(
            Recorded(
                prompt.prompt_id,
                prompt.category,
                list(output.prompt_token_ids),
                list(completion.token_ids),
                [list(position.top) for position in completion.token_logprobs],
                sampling.temperature,
                vocab_size,
                sampling.seed + i,
                rejected[output.request_id],
            )
        )
    return recorded


def record_drafts(llm: LLM, recorded: Sequence[Recorded]) -> list[Recorded]:
    """The same requests once more, to keep what the engine's method drafts at every place of their answers."""
    speculator = llm.engine.core.speculator
    assert speculator.config is not None
    drafted: dict[str, dict[int, Drafted]] = defaultdict(dict)
    with _drafts_kept(speculator, drafted):
        outputs = llm.generate(
            [{"prompt_token_ids": one.prompt_token_ids} for one in recorded], [recorded_params(one) for one in recorded]
        )
    found = []
    for one, output in zip(recorded, outputs, strict=True):
        if output.outputs[0].token_ids != one.output_token_ids:
            raise PacelineError(f"{one.prompt_id} got another answer the second time: that must never be")
        places = drafted[output.request_id]
        drafts = [places.get(position, ([], [], [])) for position in range(len(one.output_token_ids))]
        found.append(replace(one, drafted={**one.drafted, speculator.config.method: drafts}))
    return found


def recorded_params(one: Recorded) -> SamplingParams:
    """With which the request is answered alike."""
    return SamplingParams(
        temperature=one.temperature, max_tokens=len(one.output_token_ids), seed=one.seed, ignore_eos=True
    )


@contextmanager
def _drafts_kept(speculator: Speculator, drafted: dict[str, dict[int, Drafted]]) -> Iterator[None]:
    """Every place is drafted for, because no draft is offered: each step emits one token."""
    propose = speculator.propose

    def propose_and_keep(step: StepContext) -> list[DraftTree]:
        for request, tree in zip(step.requests, propose(step), strict=True):
            confidence = [round(one, 4) for one in tree.confidence or ()]
            drafted[request.request_id][request.num_output_tokens] = (tree.token_ids, tree.parents, confidence)
        return [EMPTY_TREE] * len(step.requests)

    speculator.propose = propose_and_keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        del speculator.propose  # the class's own shows again


@contextmanager
def _rejected_nodes_kept(speculator: Speculator, rejected: dict[str, list[Note]]) -> Iterator[None]:
    """Keep what the proposers are given: the logits of every row, where any of them asks for logits."""
    observe = speculator.observe

    def observe_and_keep(step: StepContext) -> None:
        if step.logits is not None:
            for verified in step.passes:
                _note_rejected(verified, step.logits, rejected[verified.request.request_id])
        observe(step)

    speculator.observe = observe_and_keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        del speculator.observe  # the class's own shows again


def _note_rejected(verified: RequestPass, logits: Tensor, notes: list[Note]) -> None:
    tree = verified.draft
    if verified.logits_row < 0 or not tree:
        return
    first = verified.logits_row + 1
    position = verified.request.num_output_tokens - len(verified.new_token_ids)
    likeliest = top_tokens(logits[first : first + len(tree)], NUM_TOP_TOKENS).tolist()
    for (at, path), top in zip(rejected_paths(tree, verified.accepted, position), likeliest, strict=True):
        if path:
            notes.append((at, path, top))


def rejected_paths(tree: DraftTree, accepted: Sequence[int], position: int) -> list[tuple[int, list[int]]]:
    """For each node the output position where its path leaves the output, and its tokens from there on.

    The path of an accepted node is empty. `position`: of the tree's first level."""
    found: list[tuple[int, list[int]]] = []
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        at, path = (position, []) if parent < 0 else found[parent]
        found.append((at + 1, []) if node in accepted else (at, [*path, token]))
    return found


def joined(recorded: Sequence[Recorded]) -> Recorded:
    """The same request, answered several times while different methods drafted: the notes on all their trees."""
    first = recorded[0]
    if any(other.output_token_ids != first.output_token_ids for other in recorded):
        raise PacelineError(f"{first.prompt_id} got another answer while another method drafted: that must never be")
    return replace(first, rejected=[note for one in recorded for note in one.rejected])


def save_recording(recorded: Sequence[Recorded], path: str | Path) -> None:
    Path(path).write_text("".join(json.dumps(asdict(one)) + "\n" for one in recorded), encoding="utf-8")


def load_recording(path: str | Path) -> list[Recorded]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [_decode(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidOptionError(
            f"{path} is not a recording (make one with `paceline bench record`): {error}"
        ) from error


def _decode(fields: dict[str, Any]) -> Recorded:
    fields["rejected"] = [(position, list(path), top) for position, path, top in fields.get("rejected", ())]
    fields["drafted"] = {
        method: [(tokens, parents, confidence) for tokens, parents, confidence in drafts]
        for method, drafts in fields.get("drafted", {}).items()
    }
    return Recorded(**fields)
