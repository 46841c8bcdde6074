"""What a drafting method is given to be tried on the toy target: a text to repeat, requests, the truth where it must be
told. All of it comes from the method's row in the table."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.forward import ForwardOutput
from paceline.core.request import Request
from paceline.core.structured import StructuredOutputsParams
from paceline.core.tree import DraftTree
from paceline.engine.core import EngineCore
from paceline.spec.methods import PROPOSERS
from paceline.spec.proposer import Proposer, StepContext
from tests.toy import EOS, VOCAB, ToyDecoder, ToyTokenizer, run_all, toy_core, toy_request

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [4, 4, 4, 4], list(range(20)), [7, 8] * 9, [0, 1, 2]]
ROOM = {"num_blocks": 256}
STRIDE = 7  # of the target whose truth is known: it goes through all tokens but EOS, again and again
PASS_S = 0.004  # well above what a few rows of the toy take


class KnownDecoder(ToyDecoder):
    """A target whose text repeats itself: what follows a token is always the same. A pass takes its time, whatever its
    rows, so that drafts pay for a method that measures that."""

    def forward(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        time.sleep(PASS_S)
        return super().forward(*args, **kwargs)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        row = torch.zeros(VOCAB)
        row[known_text(tokens[-1], 2)[1]] = 10.0
        return row


def known_text(first: int, length: int) -> list[int]:
    return [(first + STRIDE * i) % EOS for i in range(length)]


def config(method: str, known: Sequence[Sequence[int]] = (), **more: Any) -> dict[str, Any]:
    """Its example, and the whole sequences to come where an option of it takes them."""
    row = PROPOSERS[method]
    told = {row.told_by: [list(sequence) for sequence in known]} if row.told_by in row.options else {}
    return {"method": method, **row.example, **told, **more}


def told(method: str, output: Sequence[int]) -> dict[str, Any]:
    """The request's own part of it: the output to come, where a key of the request takes it."""
    row = PROPOSERS[method]
    if row.told_by == "structured_outputs":  # a grammar that allows this output alone
        text = ToyTokenizer().decode(output)
        return {"structured_outputs": StructuredOutputsParams(choice=[text])} if text else {}
    if row.told_by is None or row.told_by in row.options:
        return {}
    return {"speculative": {row.told_by: list(output)}}


def plain(sharpness: float = 3.0, **params: Any) -> list[list[int]]:
    """What the prompts' requests write without any draft, each alone."""
    batch = [toy_request(str(i), p, max_tokens=12 + i, seed=i, **params) for i, p in enumerate(PROMPTS)]
    return [run_all(toy_core(sharpness=sharpness), [request])[0] for request in batch]


def requests(method: str, expected: Sequence[Sequence[int]], **params: Any) -> list[Request]:
    return [
        toy_request(str(i), p, max_tokens=12 + i, seed=i, **params, **told(method, expected[i]))
        for i, p in enumerate(PROMPTS)
    ]


def sequences(expected: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]


def proposer_of(core: EngineCore, method: str) -> Proposer:
    return core.speculator.proposers[method]


def assert_nothing_failed(core: EngineCore, method: str) -> None:
    """The engine goes on when a drafter raises or breaks its budget, and counts it."""
    figures = core.speculator.stats().get(method, {})
    assert not figures.get("num_failures"), f"{method} raised, or drafted what its budget does not allow"
    for member, counts in figures.get("by_member", {}).items():
        assert not counts.get("num_failures"), f"{method}'s member {member} raised"


def fresh_trees(method: str, outputs: Sequence[Sequence[int]], which: Sequence[int]) -> Sequence[DraftTree]:
    core = toy_core(config(method, sequences(outputs)), **ROOM)
    batch = requests(method, outputs)
    for i in which:
        reserve(core, batch[i])
    return core.speculator.propose(StepContext([batch[i] for i in which]))


def shapes(trees: Sequence[DraftTree]) -> list[tuple[list[int], list[int]]]:
    return [(tree.token_ids, tree.parents) for tree in trees]


def core_has_proposer(method: str) -> bool:
    """Plain decoding is built for no engine: there is no proposer."""
    return PROPOSERS[method].drafts


def reserve(core: EngineCore, request: Request) -> None:
    """Blocks for the request, and the target's KV of every token but the last, as after a real pass."""
    core.kv.reserve(request, request.num_tokens + core.speculator.needs.lookahead_slots)
    size = core.runner.block_size
    for position, token in enumerate(request.token_ids[:-1]):
        slot = request.block_ids[position // size] * size + position % size
        core.runner.kv_cache[0, 0, slot] = token
        core.runner.kv_cache[0, 1, slot] = position
