"""Bugs 9, 10 and 19: a drafter's KV out of step. They never change the output, they ruin the drafts.

The check: every draft is what the drafting model would draft from scratch, after bonus tokens, after rejections, and
after steps without speculation. The toy model reads its KV back, so a stale key shows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.model.draft_model import Fed, SeparateDrafter
from paceline.spec.proposer import Budget
from tests.toy import VOCAB, ToyDecoder, ToyTokenizer, toy_core, toy_request

LENGTH = 3


class OftenRight(ToyDecoder):
    """The target, but wrong now and then, so that drafts are accepted whole, in part, and not at all."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        right = super().logits(tokens)
        return right.roll(1) if sum(tokens) % 4 == 0 else right


@dataclass
class Loaded:
    decoder: ToyDecoder
    tokenizer: ToyTokenizer


def from_scratch(model: ToyDecoder, token_ids: Sequence[int], length: int) -> list[int]:
    drafted: list[int] = []
    for _ in range(length):
        drafted.append(int(model.logits([*token_ids, *drafted]).argmax()))
    return drafted


def check_drafts(pauses: bool) -> None:
    model = OftenRight()
    config = {"method": "draft_model", "model": Loaded(model, ToyTokenizer()), "num_speculative_tokens": LENGTH}
    core = toy_core(config, num_blocks=64)
    requests = [toy_request(f"r{i}", [i, 3, 5], max_tokens=30, ignore_eos=True) for i in range(4)]
    for request in requests:
        core.add_request(request)
    propose = core.speculator.propose
    accepted: set[int] = set()
    num_steps = 0

    def checked(step: Any) -> list[DraftTree]:
        nonlocal num_steps
        num_steps += 1
        if pauses and num_steps % 5 < 2:
            return [EMPTY_TREE] * len(step.requests)
        trees = propose(step)
        accepted.update(len(part.accepted) for part in step.passes if part.draft)
        for request, tree in zip(step.requests, trees, strict=True):
            assert tree.token_ids == from_scratch(model, request.token_ids, len(tree)), "a draft from stale KV"
        return trees

    core.speculator.propose = checked  # type: ignore[method-assign]
    while core.has_requests:
        core.step()
    assert accepted == set(range(LENGTH + 1)), "some kind of ending did not come up"


class BelievesTheLastWasFed(Fed):
    """Bug 9: after a block accepted whole, the last draft token is taken to have KV; only the ones before it do."""

    def valid(self, token_ids: Sequence[int]) -> int:
        whole = token_ids[self.num_tokens : self.num_tokens + len(self.chain)] == self.chain
        return min(super().valid(token_ids) + whole, len(token_ids) - 1)


class BelievesTheRejected(Fed):
    """Bug 10: KV of a rejected token stays, and the token that replaced it is never fed."""

    def valid(self, token_ids: Sequence[int]) -> int:
        return min(self.num_tokens + len(self.chain), len(token_ids) - 1)


class NeverCatchesUp(Fed):
    """Bug 19: what was decoded while speculation was off is never fed."""

    def valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids) - 1


@pytest.mark.parametrize("pauses", [False, True])
def test_every_draft_is_what_the_model_would_draft_from_scratch(pauses: bool) -> None:
    check_drafts(pauses)


@pytest.mark.parametrize(
    ("bug", "broken", "pauses"),
    [(9, BelievesTheLastWasFed, False), (10, BelievesTheRejected, True), (19, NeverCatchesUp, True)],
    ids=["9", "10", "19"],
)
def test_the_toy_detects_kv_out_of_step(
    bug: int, broken: type[Fed], pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = SeparateDrafter.draft

    def with_bug(self: SeparateDrafter, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = draft(self, requests, budgets)
        self._fed = {name: broken(fed.num_tokens, fed.chain) for name, fed in self._fed.items()}
        return trees

    monkeypatch.setattr(SeparateDrafter, "draft", with_bug)
    with pytest.raises(AssertionError, match=r"stale KV|attends to positions"):
        check_drafts(pauses)


def test_the_toy_drafter_is_sometimes_wrong() -> None:
    contexts = torch.randint(VOCAB, (40, 5), generator=torch.Generator().manual_seed(0)).tolist()
    wrong = [from_scratch(OftenRight(), c, 1) != from_scratch(ToyDecoder(), c, 1) for c in contexts]
    assert 0 < sum(wrong) < len(wrong)
