"""Every decision has randomness of its own (bug 7), and the real dice give the distributions that were enumerated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.ops.random import Purpose, keyed_coin, noise_key, pick
from paceline.ops.sampling_types import Probs
from paceline.verifiers import dice as dice_module
from paceline.verifiers import make_verifier
from paceline.verifiers.block import block_walk
from paceline.verifiers.dice import KeyedDice
from paceline.verifiers.multi_step import multi_step_walk
from paceline.verifiers.rule_verifier import RuleVerifier

VOCAB = 5
RULES = {"multi_step": multi_step_walk, "block": block_walk}


class SameForEveryDecision(KeyedDice):
    """Bug 7, inside a step: one number decides everything."""

    def _uniform(self, purpose: Purpose, index: int) -> float:
        return super()._uniform(Purpose.ACCEPT, 0)


class SameInEveryStep(KeyedDice):
    """Bug 7, between steps: a decision is named by its node, not by its step."""

    def _uniform(self, purpose: Purpose, index: int) -> float:
        return keyed_coin(noise_key(self._seed, 0, purpose, index))


@contextmanager
def noted_numbers() -> Iterator[list[float]]:
    numbers: list[float] = []
    original: Callable[[int], float] = dice_module.keyed_coin

    def noting(key: int) -> float:
        numbers.append(original(key))
        return numbers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dice_module, "keyed_coin", noting)
        patch.setitem(globals(), "keyed_coin", noting)
        yield numbers


def numbers_of_a_run(dice: type[KeyedDice], rule: Any) -> list[float]:
    """Every random number that thirty steps of one request used."""
    generator = np.random.default_rng(0)
    request = Request("r", [1], SamplingParams(), max_tokens=500, seed=9)
    with noted_numbers() as numbers:
        for _ in range(30):
            tree = DraftTree.chain(generator.integers(VOCAB, size=4).tolist())
            walk = rule(tree, dice(request))
            wanted = next(walk)
            try:
                while True:
                    wanted = walk.send([generator.dirichlet(np.ones(VOCAB)) for _ in wanted])
            except StopIteration as stop:
                request.token_ids += [tree.token_ids[node] for node in stop.value.accepted] + [stop.value.last_token]
    return numbers


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_7_no_number_is_used_twice(rule: Any) -> None:
    numbers = numbers_of_a_run(KeyedDice, rule)
    assert len(numbers) >= 60 and len(set(numbers)) == len(numbers)
    for broken in (SameForEveryDecision, SameInEveryStep):
        numbers = numbers_of_a_run(broken, rule)
        assert len(set(numbers)) < len(numbers)


def emitted_pvalue(verifier: RuleVerifier, num_seeds: int = 3_000) -> float:
    """Chi-square of the first token, over seeds: draft drawn from q, then verified, against p."""
    generator = np.random.default_rng(3)
    p, q = generator.dirichlet(np.ones(VOCAB)), generator.dirichlet(np.ones(VOCAB))
    logits = torch.from_numpy(np.log(np.stack([p, p, p]))).float()
    counts = np.zeros(VOCAB)
    for seed in range(num_seeds):
        request = Request("r", [1], SamplingParams(), max_tokens=9, seed=seed)
        drafted = [pick(keyed_coin(noise_key(seed, 1, Purpose.DRAFT, i)), q) for i in range(2)]
        tree = DraftTree(drafted, [-1, 0], torch.from_numpy(np.stack([q, q])))
        (result,) = verifier.verify([request], [tree], logits)
        counts[result.token_ids[0]] += 1
    return float(stats.chisquare(counts, num_seeds * p).pvalue)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_7_the_real_dice_emit_p(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odds of failing by chance: 1e-4 for the real dice, below 1e-6 of missing the broken ones."""
    assert emitted_pvalue(RuleVerifier("real", rule)) > 1e-4
    monkeypatch.setattr("paceline.verifiers.rule_verifier.KeyedDice", SameForEveryDecision)
    assert emitted_pvalue(RuleVerifier("broken", rule)) < 1e-4


def test_an_impossible_token_is_never_let_through_and_a_certain_one_always() -> None:
    request = Request("r", [1], SamplingParams(temperature=0.0), max_tokens=9, seed=0)
    logits = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    q: Probs = np.full((2, 3), 1 / 3)
    for rule in ("rejection", "multi_step", "block"):
        verifier = make_verifier(rule)
        for seed in range(50):
            request.seed = seed
            (right,) = verifier.verify([request], [DraftTree([1, 0], [-1, 0], torch.from_numpy(q))], logits)
            (wrong,) = verifier.verify([request], [DraftTree([2, 0], [-1, 0], torch.from_numpy(q))], logits)
            assert right.token_ids == [1, 0, 2] and wrong.token_ids == [1]


def test_seeded_runs_repeat() -> None:
    request = Request("r", [1], SamplingParams(), max_tokens=9, seed=5)
    logits = torch.zeros(1, VOCAB)
    for rule in ("rejection", "sample_match"):
        results = [make_verifier(rule).verify([request], [EMPTY_TREE], logits)[0].token_ids for _ in range(2)]
        assert results[0] == results[1]
