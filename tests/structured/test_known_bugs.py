"""Bugs that engines shipped with grammars under speculation, each put into a copy of our constraint: the enumeration
must see it. Every test runs one check on the real code and on the broken variant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paceline.core.constraint import Allowed
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.structured.matching import CompiledGrammar, OutputConstraint
from paceline.verifiers.dice import Dice
from paceline.verifiers.multi_step import rejection_walk
from paceline.verifiers.sample_match import sample_match_walk
from paceline.verify.enumeration import World, tokens_of_rows, total_variation, toy_logits
from paceline.verify.toy_drafter import ToyDrafter
from tests.structured.small_vocabulary import AB, END, VOCAB, A, B, constrained

EXACT, VISIBLE = 1e-12, 1e-3
TREES = (
    DraftTree.chain([A, B, A]),
    DraftTree.chain([AB, END]),
    DraftTree([A, AB, B, A], [-1, -1, 0, 1]),
    DraftTree([A, END, B, A, END], [-1, 0, 0, 2, 2]),
)
REGEXES = ("(ab)+a?", "a{1,3}b", "a(b|a)*")


def worst_error(broken: type["Broken"] | None = None) -> float:
    """The largest total variation between sample_match on a draft and plain decoding that is right."""
    errors = []
    for regex in REGEXES:
        for seed, tree in enumerate(TREES):
            world = World(toy_logits(VOCAB, seed), constrained(regex))
            expected = world.plain(3)
            if broken is not None:
                plant(broken, world.request)
            rule = lambda tree, dice: sample_match_walk(tree)  # noqa: E731
            try:
                found = world.emitted(rule, lambda dice, tree=tree: tree, 3, answer=tokens_of_rows)
            except RequestFailedError:  # the output has left the grammar, which is seen at the next token
                found = {}
            errors.append(total_variation(found, expected))
    return max(errors)


def plant(broken: type["Broken"], request: Request) -> None:
    real = request.constraint
    assert isinstance(real, OutputConstraint)
    request.constraint = broken(real._compiled, real._view, request)


class Broken(OutputConstraint):
    """The real one, until a subclass breaks it. Plain decoding behind the draft is right."""

    def of_request(self, request: Request) -> OutputConstraint:
        return OutputConstraint(self._compiled, self._view, request)


def everything() -> Allowed:
    return np.ones(VOCAB, dtype=bool)


class ShiftedByOneNode(Broken):
    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        return super().allowed(draft_ids[:-1])


class NotRolledBack(Broken):
    def __init__(self, compiled: Any, view: Any, request: Request) -> None:
        forgetful = CompiledGrammar(Forgetful(compiled.matcher), names_tokens=False)  # type: ignore[arg-type]
        super().__init__(forgetful, view, request)
        self._sound = compiled

    def of_request(self, request: Request) -> OutputConstraint:
        return OutputConstraint(self._sound, self._view, request)


@dataclass
class Forgetful:
    """A matcher that says that it has gone back, and has not."""

    matcher: Any

    def deep_copy(self) -> "Forgetful":
        return Forgetful(self.matcher.deep_copy())

    def rollback(self, num_tokens: int) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


class GoesOnAfterTheEnd(Broken):
    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        return everything() if END in draft_ids else super().allowed(draft_ids)


class ReadsPastAStopToken(Broken):
    """The end token in a draft is skipped, and what stands behind it is read as a continuation."""

    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        return super().allowed([token for token in draft_ids if token != END])


class BonusTokenUnmasked(Broken):
    leaves: Callable[[tuple[int, ...]], bool] = staticmethod(
        lambda path: any(
            path == tuple(tree.token_ids[i] for i in tree.ancestors(leaf))
            for tree in TREES
            for leaf in range(len(tree))
            if leaf not in tree.parents
        )
    )

    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        return everything() if self.leaves(tuple(draft_ids)) else super().allowed(draft_ids)


class RootMaskedOnly(Broken):
    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        return everything() if draft_ids else super().allowed(draft_ids)


def test_the_real_constraint_is_exact() -> None:
    assert worst_error() < EXACT


@pytest.mark.parametrize(
    "broken",
    [ShiftedByOneNode, NotRolledBack, GoesOnAfterTheEnd, ReadsPastAStopToken, BonusTokenUnmasked, RootMaskedOnly],
)
def test_each_planted_bug_is_seen(broken: type[Broken]) -> None:
    assert worst_error(broken) > VISIBLE


class PrunesDrawnNodes(OutputConstraint):
    """Nodes that were drawn from q are taken out like any others."""

    def prune(self, tree: DraftTree) -> DraftTree:
        kept = super().prune(DraftTree(tree.token_ids, tree.parents))
        return tree.keep(range(len(kept)))  # of a chain


@pytest.mark.parametrize("broken", [False, True])
def test_a_drawn_node_that_cannot_come_must_be_rejected_by_its_rule(broken: bool) -> None:
    """Taken out, nothing would be subtracted from p, and the likeliest tokens of q would come too rarely."""
    errors = []
    for seed in range(4):
        world = World(toy_logits(VOCAB, seed), constrained("a(b|a)*"))
        expected = world.plain(2)
        if broken:
            plant(PrunesDrawnNodes, world.request)  # type: ignore[arg-type]
        constraint = world.request.constraint
        assert constraint is not None
        drafter = ToyDrafter(VOCAB, seed + 100, (1,), kind="replacement")

        def draft(dice: Dice, drafter: Any = drafter, constraint: Any = constraint) -> DraftTree:
            pruned: DraftTree = constraint.prune(drafter(dice))
            return pruned

        errors.append(total_variation(world.emitted(rejection_walk, draft, 2), expected))
    assert max(errors) > VISIBLE if broken else max(errors) < EXACT
