"""Losslessness bugs that other engines shipped, each put into a copy of our rule: the check must see it.

Every test runs one check on the real code and on a broken variant. The first must be exact, the second must have a
visible error (total variation above VISIBLE). The numbers are those of the list in docs/sampling.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.ops import sampling, sampling_edits
from paceline.ops.random import Purpose
from paceline.ops.sampling import NodeRow, target_probs
from paceline.ops.sampling_types import Probs
from paceline.verifiers import block, multi_step
from paceline.verifiers.block import block_walk
from paceline.verifiers.dice import Dice, accepts
from paceline.verifiers.multi_step import multi_step_walk, rejection_walk
from paceline.verifiers.residual import residual
from paceline.verifiers.sample_match import sample_match_walk
from paceline.verifiers.walk import ROOT, Path, Walk
from paceline.verify.enumeration import Draft, Rule, World, tokens_of_rows, total_variation, toy_logits
from paceline.verify.toy_drafter import ToyDrafter

EXACT = 1e-12
VISIBLE = 1e-3
SEEDS = range(4)
VOCAB = 3


def world_of(seed: int, **params: Any) -> World:
    request = Request("toy", [0, 1], SamplingParams(max_tokens=64, **params), max_tokens=64, seed=0)
    return World(toy_logits(VOCAB, seed), request)


def worst_error(
    rule: Rule, draft_of: Callable[[int], Draft], length: int = 3, answer: Any = None, **params: Any
) -> float:
    """The largest total variation between what is emitted and plain decoding, over a few random worlds."""
    kwargs = {} if answer is None else {"answer": answer}
    errors = []
    for seed in SEEDS:
        world = world_of(seed, **params)
        found = world.emitted(rule, draft_of(seed), length, **kwargs)
        errors.append(total_variation(found, world.plain(length)))
    return max(errors)


def drafter(kind: str = "replacement", shape: Sequence[int] = (1, 1), **kwargs: Any) -> Callable[[int], Draft]:
    return lambda seed: ToyDrafter(VOCAB, seed + 100, shape, kind=kind, **kwargs)


def match(tree: DraftTree, dice: Dice) -> Walk[int]:
    return sample_match_walk(tree)


# 1 and 2: q is not what the token was drawn from


def test_1_greedy_draft_with_a_soft_q() -> None:
    def broken(seed: int) -> Draft:
        honest = ToyDrafter(VOCAB, seed + 100, (1, 1), kind="fixed")

        def draft(dice: Dice) -> DraftTree:
            tree = honest(dice)
            paths = [[tree.token_ids[i] for i in tree.ancestors(node)][:-1] for node in range(len(tree))]
            return replace(tree, draft_probs=torch.tensor(np.stack([honest.q(path, 0) for path in paths])))

        return draft

    assert worst_error(rejection_walk, drafter("fixed")) < EXACT
    assert worst_error(rejection_walk, broken) > VISIBLE


def test_2_q_reported_raw_but_sampled_processed() -> None:
    @dataclass
    class Sharpened(ToyDrafter):
        report_raw: bool = False

        def q(self, path: Sequence[int], member: int) -> Probs:
            sharp = ToyDrafter.q(self, path, member) ** 2
            return sharp / sharp.sum()

        def __call__(self, dice: Dice) -> DraftTree:
            tree = ToyDrafter.__call__(self, dice)
            if not self.report_raw:
                return tree
            paths = [[tree.token_ids[i] for i in tree.ancestors(node)][:-1] for node in range(len(tree))]
            raw = torch.tensor(np.stack([ToyDrafter.q(self, path, 0) for path in paths]))
            return replace(tree, draft_probs=raw)

    assert worst_error(rejection_walk, lambda seed: Sharpened(VOCAB, seed, (1, 1))) < EXACT
    assert worst_error(rejection_walk, lambda seed: Sharpened(VOCAB, seed, (1, 1), report_raw=True)) > VISIBLE


# 3 to 8: the rule itself


def test_3_a_match_that_accepts_everything_or_is_off_by_one() -> None:
    def accepts_everything(tree: DraftTree, dice: Dice) -> Walk[int]:
        (token,) = yield (len(tree) - 1,)
        return Path(list(range(len(tree))), token)

    def one_too_many(tree: DraftTree, dice: Dice) -> Walk[int]:
        """Counts the mismatching position as matched, and draws the bonus after it."""
        accepted = []
        for node in range(len(tree)):
            (token,) = yield (node - 1,)
            accepted.append(node)
            if token != tree.token_ids[node]:
                break
        (token,) = yield (accepted[-1],)
        return Path(accepted, token)

    assert worst_error(match, drafter("fixed"), answer=tokens_of_rows) < EXACT
    assert worst_error(accepts_everything, drafter("fixed"), answer=tokens_of_rows) > VISIBLE
    assert worst_error(one_too_many, drafter("fixed"), answer=tokens_of_rows) > VISIBLE


@pytest.mark.parametrize(("rule", "rows"), [(match, tokens_of_rows), (rejection_walk, None), (block_walk, None)])
def test_4_bonus_drawn_at_temperature_1(rule: Rule, rows: Any) -> None:
    def broken(nodes: Sequence[NodeRow], logits: Tensor, dice: Dice) -> list[Any]:
        warm = [
            NodeRow(replace(row.request, sampling_params=SamplingParams()), row.draft_ids, row.logits_row)
            if len(row.draft_ids) == 2
            else row
            for row in nodes
        ]
        return tokens_of_rows(warm, logits, dice) if rows else target_probs(warm, logits)

    kind = "fixed" if rows else "replacement"
    assert worst_error(rule, drafter(kind), answer=rows, temperature=0.5) < EXACT
    assert worst_error(rule, drafter(kind), answer=broken, temperature=0.5) > VISIBLE


@pytest.mark.parametrize("shape", [(1, 1), (2,)])
def test_5_recovered_token_drawn_from_p(shape: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_error(multi_step_walk, drafter(shape=shape)) < EXACT
    monkeypatch.setattr(multi_step, "residual", lambda p, q: p)
    assert worst_error(multi_step_walk, drafter(shape=shape)) > VISIBLE


def test_6_independent_samples_per_path_and_the_best_path_kept() -> None:
    def broken(tree: DraftTree, dice: Dice) -> Walk[int]:
        best = Path([], -1)
        for leaf in (node for node in range(len(tree)) if node not in tree.parents):
            path = []
            for node in [ROOT, *tree.ancestors(leaf)]:
                (token,) = yield (node,)
                child = tree.children()[node].get(token)
                if child is None or child not in tree.ancestors(leaf):
                    break
                path.append(child)
            if best.last_token < 0 or len(path) > len(best.accepted):
                best = Path(path, token)
        return best

    assert worst_error(match, drafter("fixed", (2,)), length=2, answer=tokens_of_rows) < EXACT
    assert worst_error(broken, drafter("fixed", (2,)), length=2, answer=tokens_of_rows) > VISIBLE


def test_8_block_verification_with_token_criteria(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_token(i: int, wanted: Sequence[float], p: Sequence[Probs], q: Sequence[Probs]) -> float:
        return wanted[i]  # the running product of min(1, p/q), and still the last success wins

    assert worst_error(block_walk, drafter()) < EXACT
    monkeypatch.setattr(block, "stay_probability", per_token)
    assert worst_error(block_walk, drafter()) > VISIBLE


def test_siblings_without_replacement_need_renormalising() -> None:
    exact = worst_error(lambda t, d: multi_step_walk(t, d, replacement=False), drafter("shared_rows", (2,)), length=2)
    assert exact < EXACT
    assert worst_error(multi_step_walk, drafter("shared_rows", (2,)), length=2) > VISIBLE


def test_dropping_an_unlikely_sampled_token_biases() -> None:
    """The shape of a tree must not depend on which token a sampled child turned out to be."""

    def pruned(seed: int) -> Draft:
        honest = ToyDrafter(VOCAB, seed + 100, (1,))

        def draft(dice: Dice) -> DraftTree:
            tree = honest(dice)
            assert tree.draft_probs is not None
            return tree if tree.draft_probs[0, tree.token_ids[0]] > 0.4 else EMPTY_TREE

        return draft

    assert worst_error(rejection_walk, drafter(shape=(1,)), length=2) < EXACT
    assert worst_error(rejection_walk, pruned, length=2) > VISIBLE


# 11 and 20: options on the nodes of a draft


def no_ancestors(row: NodeRow) -> NodeRow:
    return replace(row, draft_ids=())


def counted_twice(row: NodeRow) -> NodeRow:
    return replace(row, draft_ids=row.draft_ids * 2)


def only_the_first(row: NodeRow) -> NodeRow:
    return replace(row, draft_ids=row.draft_ids[:1])


@pytest.mark.parametrize("mistake", [no_ancestors, counted_twice, only_the_first])
def test_11_penalties_that_do_not_count_draft_ancestors_once_each(
    mistake: Callable[[NodeRow], NodeRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    assert worst_error(match, drafter("fixed"), answer=tokens_of_rows, **options) < EXACT
    assert worst_error(rejection_walk, drafter(), **options) < EXACT
    edit = sampling_edits.edit_logits
    monkeypatch.setattr(sampling, "edit_logits", lambda row, logits: edit(mistake(row), logits))
    assert worst_error(match, drafter("fixed"), answer=tokens_of_rows, **options) > VISIBLE
    assert worst_error(rejection_walk, drafter(), **options) > VISIBLE


RELAXABLE = [
    {"min_p": 0.5},
    {"top_k": 1},
    {"top_p": 0.5},
    {"logit_bias": {0: 2.0}},
    {"allowed_token_ids": [0, 1]},
    {"min_tokens": 3, "stop_token_ids": [2]},
    {"logits_processors": [lambda token_ids, logits: logits + torch.tensor([1.0, 0.0, 0.0]) * len(token_ids)]},
]


@pytest.mark.parametrize("option", RELAXABLE, ids=lambda option: next(iter(option)))
def test_20_an_option_relaxed_on_draft_nodes(option: dict[str, Any]) -> None:
    def relaxed(rows: Sequence[NodeRow], logits: Tensor, dice: Dice) -> list[Any]:
        free = [
            replace(row, request=replace(row.request, sampling_params=SamplingParams())) if row.draft_ids else row
            for row in rows
        ]
        return tokens_of_rows(free, logits, dice)

    assert worst_error(match, drafter("fixed"), answer=tokens_of_rows, **option) < EXACT
    assert worst_error(match, drafter("fixed"), answer=relaxed, **option) > VISIBLE


# 15, 16, 18: corners


def test_15_u_of_zero_and_a_token_of_probability_zero() -> None:
    def broken(u: float, probability: float) -> bool:
        return u <= probability

    assert not accepts(0.0, 0.0)
    assert accepts(1.0 - 2.0**-53, 1.0)
    assert broken(0.0, 0.0)


def test_16_an_all_zero_residual() -> None:
    def broken(p: Probs, q: Probs) -> Probs:
        left = (p - q).clip(min=0.0)
        with np.errstate(invalid="ignore"):
            return left / left.sum()

    p = np.array([0.25, 0.75, 0.0])
    assert np.array_equal(residual(p, p.copy()), p)
    assert np.isnan(broken(p, p.copy())).all()


@pytest.mark.parametrize("rule", [rejection_walk, multi_step_walk, block_walk])
def test_18_an_empty_draft(rule: Rule) -> None:
    def broken(tree: DraftTree, dice: Dice) -> Walk[Probs]:
        """Nothing was rejected, so it takes the bonus row of the longest draft in the batch: the last it saw."""
        (p,) = yield (ROOT,)
        return Path([], dice.choose(np.ones_like(p) if not len(tree) else p, Purpose.BONUS))

    assert worst_error(rule, lambda seed: lambda dice: EMPTY_TREE, length=1) < EXACT
    assert worst_error(broken, lambda seed: lambda dice: EMPTY_TREE, length=1) > VISIBLE
