"""Exact distributions of what the real rules emit, by taking every way out of every random decision in turn.

`outcomes(play)` runs `play(dice)` once for every sequence of decisions and returns outcome -> probability. Nothing is
simulated: the rule, the options and the walk are the real code; only the dice are ours.

`World.emitted(...)` adds up, over all drafts a drafter can draw and all decisions of the rule, the distribution of the
next tokens, the rest of the sequence being decoded plainly; `World.plain(...)` is what it must equal.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.random import Purpose
from paceline.ops.sampling import NodeRow, target_probs
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice
from paceline.verifiers.walk import Walk, run_walks

Outcome = TypeVar("Outcome", bound=Hashable)
Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]
Rule = Callable[[DraftTree, Dice], Walk[Any]]
Draft = Callable[[Dice], DraftTree]
AnswerRows = Callable[[Sequence[NodeRow], Tensor, Dice], Sequence[Any]]


@dataclass
class EveryWay:
    """Dice that follow a script, and note the other ways out of every decision beyond it."""

    script: Tokens
    taken: list[int] = field(default_factory=list)
    untried: list[Tokens] = field(default_factory=list)
    probability: float = 1.0

    def accept(self, probability: float, purpose: Purpose, index: int) -> bool:
        return bool(self._decide([1.0 - probability, probability]))

    def choose(self, probs: Probs, purpose: Purpose, index: int = 0) -> int:
        return self._decide((probs / probs.sum()).tolist())

    def _decide(self, weights: Sequence[float]) -> int:
        if not all(weight >= 0.0 for weight in weights) or abs(sum(weights) - 1.0) > 1e-9:
            raise ArithmeticError(f"these are no probabilities: {weights}")
        depth = len(self.taken)
        if depth < len(self.script):
            way = self.script[depth]
        else:
            way, *others = (i for i, weight in enumerate(weights) if weight > 0.0)
            self.untried += [(*self.taken, other) for other in others]
        self.taken.append(way)
        self.probability *= weights[way]
        return way


def outcomes(play: Callable[[Dice], Outcome]) -> dict[Outcome, float]:
    total: dict[Outcome, float] = defaultdict(float)
    scripts: list[Tokens] = [()]
    while scripts:
        dice = EveryWay(scripts.pop())
        total[play(dice)] += dice.probability
        scripts += dice.untried
    return dict(total)


def probs_of_rows(rows: Sequence[NodeRow], logits: Tensor, dice: Dice) -> Sequence[Any]:
    """What the rules that compare p with q are answered."""
    return target_probs(rows, logits)


def tokens_of_rows(rows: Sequence[NodeRow], logits: Tensor, dice: Dice) -> Sequence[Any]:
    """What sample_match is answered: the target's own token, every possible one in turn."""
    probs = target_probs(rows, logits)
    return [p if isinstance(p, RequestFailedError) else dice.choose(p, Purpose.SAMPLE) for p in probs]


@dataclass
class World:
    """A request, and a target that has logits for every context."""

    logits_after: Callable[[Sequence[int]], Tensor]  # tokens so far -> [vocab] float32
    request: Request

    def plain(self, length: int) -> Distribution:
        total: Distribution = {(): 1.0}
        for _ in range(length):
            total = self._one_more(total)
        return total

    def emitted(self, rule: Rule, draft: Draft, length: int, answer: AnswerRows = probs_of_rows) -> Distribution:
        """The first `length` tokens: one pass with a draft, then plain decoding."""

        def play(dice: Dice) -> Tokens:
            tree = draft(dice)
            walks = [rule(tree, dice)]
            logits = self._pass_logits(tree)
            (result,) = run_walks(walks, [self.request], [tree], logits, lambda r, x: answer(r, x, dice))
            if result.error is not None:
                raise result.error
            return tuple(result.token_ids[:length])

        open_ended: Distribution = defaultdict(float, outcomes(play))
        for size in range(1, length):
            shorter = {tokens: weight for tokens, weight in open_ended.items() if len(tokens) == size}
            for tokens in shorter:
                del open_ended[tokens]
            for tokens, weight in self._one_more(shorter).items():
                open_ended[tokens] += weight
        return dict(open_ended)

    def _pass_logits(self, tree: DraftTree) -> Tensor:  # [1 + nodes, vocab]
        paths = [[tree.token_ids[i] for i in tree.ancestors(node)] for node in range(-1, len(tree))]
        return torch.stack([self.logits_after([*self.request.token_ids, *path]) for path in paths])

    def _probs(self, token_ids: Tokens) -> Probs:
        """p of plain decoding once these tokens were emitted."""
        later = replace(self.request)
        later.token_ids = [*self.request.token_ids, *token_ids]
        if later.constraint is not None:
            later.constraint = later.constraint.of_request(later)
        (p,) = target_probs([NodeRow(later, (), 0)], self.logits_after(later.token_ids)[None])
        if isinstance(p, RequestFailedError):
            raise p
        return p

    def _one_more(self, total: Distribution) -> Distribution:
        longer: Distribution = {}
        for tokens, weight in total.items():
            for token, p in enumerate(self._probs(tokens).tolist()):
                if p > 0.0:
                    longer[*tokens, token] = weight * p
        return longer


def total_variation(a: Distribution, b: Distribution) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def largest_difference(a: Distribution, b: Distribution) -> float:
    return max((abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}), default=0.0)


def toy_logits(vocab_size: int, seed: int, spread: float = 1.5) -> Callable[[Sequence[int]], Tensor]:
    """A target: random logits for every context. They are rounded, so that ties happen too."""

    def logits_after(context: Sequence[int]) -> Tensor:
        values = np.random.default_rng([seed, *context]).normal(0.0, spread, vocab_size)
        return torch.from_numpy(values.round(1).astype(np.float32))

    return logits_after
