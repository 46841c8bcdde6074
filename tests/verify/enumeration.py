"""Exact distributions of what the real rules emit, by taking every way out of every random decision in turn.

`outcomes(play)` runs `play(dice)` once for every sequence of decisions and returns outcome -> probability. Nothing is
simulated: the rule, the processors and the walk are the real code; only the dice are ours.

`emitted(...)` adds up, over all drafts a drafter can draw and all decisions of the rule, the distribution of the next
tokens, the rest of the sequence being decoded plainly; `plain(...)` is what it must equal.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import DraftTree
from paceline.errors import RequestFailedError
from paceline.ops.random import Purpose
from paceline.ops.sampling import NodeRow, target_probs
from paceline.ops.sampling_types import Probs
from paceline.verify.dice import Dice
from paceline.verify.walk import Walk, run_walks

Outcome = TypeVar("Outcome", bound=Hashable)
Rule = Callable[[DraftTree, Dice], Walk[Any]]


@dataclass
class EveryWay:
    """Dice that follow a script, and note the other ways out of every decision beyond it."""

    script: tuple[int, ...]
    taken: list[int] = field(default_factory=list)
    untried: list[tuple[int, ...]] = field(default_factory=list)
    probability: float = 1.0

    def accept(self, probability: float, purpose: Purpose, index: int) -> bool:
        return bool(self._decide([(0, 1.0 - probability), (1, probability)]))

    def choose(self, probs: Any, purpose: Purpose, index: int = 0) -> int:
        weights = (np.asarray(probs) / np.asarray(probs).sum()).tolist()
        return self._decide(list(enumerate(weights)))

    def _decide(self, ways: list[tuple[int, float]]) -> int:
        assert all(weight >= 0.0 for _, weight in ways), f"not probabilities: {ways}"
        assert abs(sum(weight for _, weight in ways) - 1.0) < 1e-9, f"not probabilities: {ways}"
        possible = {way: weight for way, weight in ways if weight > 0.0}
        depth = len(self.taken)
        if depth < len(self.script):
            way = self.script[depth]
        else:
            way, *others = possible
            self.untried += [(*self.taken, other) for other in others]
        self.taken.append(way)
        self.probability *= possible[way]
        return way


def outcomes(play: Callable[[Dice], Outcome]) -> dict[Outcome, float]:
    total: dict[Outcome, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        dice = EveryWay(scripts.pop())
        outcome = play(dice)
        total[outcome] += dice.probability
        scripts += dice.untried
    assert abs(sum(total.values()) - 1.0) < 1e-9
    return dict(total)


@dataclass
class ToyTarget:
    """Random logits for every context over a small vocabulary; -inf and ties happen too."""

    vocab: int
    seed: int
    spread: float = 1.5

    def logits(self, context: Sequence[int]) -> Tensor:  # [vocab] float32
        generator = np.random.default_rng([self.seed, *context])
        values = generator.normal(0.0, self.spread, self.vocab).round(2)
        return torch.tensor(values, dtype=torch.float32)


def toy_request(params: SamplingParams, prompt: Sequence[int] = (0, 1), **others: Any) -> Request:
    return Request("toy", list(prompt), params, max_tokens=64, seed=0, **others)


def with_output(request: Request, token_ids: Sequence[int]) -> Request:
    """The request after these tokens were emitted: what plain decoding looks at."""
    later = replace(request)
    later.token_ids = [*request.token_ids, *token_ids]
    return later


@dataclass
class World:
    target: ToyTarget
    request: Request

    def pass_logits(self, tree: DraftTree) -> Tensor:  # [1 + nodes, vocab]
        paths: list[list[int]] = [[]]
        paths += [[tree.token_ids[i] for i in tree.ancestors(node)] for node in range(len(tree))]
        return torch.stack([self.target.logits([*self.request.token_ids, *path]) for path in paths])

    def probs(self, token_ids: Sequence[int]) -> Probs:
        """p of plain decoding after these tokens were emitted."""
        later = with_output(self.request, token_ids)
        (p,) = target_probs([NodeRow(later, (), 0)], self.target.logits(later.token_ids)[None])
        if isinstance(p, RequestFailedError):
            raise p
        return p

    def plain(self, length: int) -> dict[tuple[int, ...], float]:
        total: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            total = self._one_more(total)
        return total

    def emitted(
        self,
        rule: Rule,
        draft: Callable[[Dice], DraftTree],
        length: int,
        answer: Callable[[Sequence[NodeRow], Tensor, Dice], Any] = lambda rows, logits, dice: target_probs(
            rows, logits
        ),
    ) -> dict[tuple[int, ...], float]:
        """The first `length` tokens: one pass with a draft, then plain decoding."""

        def play(dice: Dice) -> tuple[int, ...]:
            tree = draft(dice)
            walks = [rule(tree, dice)]
            (result,) = run_walks(
                walks,
                [self.request],
                [tree],
                self.pass_logits(tree),
                lambda rows, logits: answer(rows, logits, dice),
            )
            if result.error is not None:
                raise result.error
            assert result.token_ids[:-1] == [tree.token_ids[node] for node in result.accepted]
            return tuple(result.token_ids[:length])

        partial = outcomes(play)
        done: dict[tuple[int, ...], float] = defaultdict(float)
        for size in range(1, length + 1):
            now = {tokens: weight for tokens, weight in partial.items() if len(tokens) == size}
            if size < length:
                for tokens, weight in self._one_more(now).items():
                    partial[tokens] = partial.get(tokens, 0.0) + weight
            else:
                done.update(now)
        return dict(done)

    def _one_more(self, total: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        longer: dict[tuple[int, ...], float] = {}
        for tokens, weight in total.items():
            for token, p in enumerate(self.probs(tokens).tolist()):
                if p > 0.0:
                    longer[(*tokens, token)] = weight * p
        return longer


def total_variation(a: dict[Any, float], b: dict[Any, float]) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def largest_difference(a: dict[Any, float], b: dict[Any, float]) -> float:
    return max((abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}), default=0.0)


@dataclass
class ToyDrafter:
    """Draws children for every node of a shape from random distributions of its own.

    `shape[d]` is the number of children of every node at depth d. `kind`: "replacement", "no_replacement" (rows are
    conditional), "shared_rows" (without replacement, but every sibling carries the full row), "fixed" (top tokens)."""

    vocab: int
    seed: int
    shape: Sequence[int]
    kind: str = "replacement"
    members: int = 1
    sharp: float = 1.0

    def q(self, context: Sequence[int], member: int) -> Tensor:
        generator = np.random.default_rng([self.seed, member, *context])
        weights = torch.from_numpy(generator.dirichlet([self.sharp] * self.vocab))
        weights[weights < 1e-3] = 0.0  # distributions with holes
        return weights / weights.sum()

    def __call__(self, dice: Dice) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[Tensor] = []
        members: list[str] = []
        level: list[tuple[int, list[int]]] = [(-1, [])]
        draws = itertools.count()
        for width in self.shape:
            below: list[tuple[int, list[int]]] = []
            for node, path in level:
                for token, row, member in self._children(path, width, dice, draws):
                    below.append((len(tokens), [*path, token]))
                    tokens.append(token)
                    parents.append(node)
                    rows.append(row)
                    members.append(f"drafter {member}")
            level = below
        probs = torch.stack(rows) if rows and self.kind != "fixed" else None
        return DraftTree(tokens, parents, probs, members)

    def _children(
        self, path: list[int], width: int, dice: Dice, draws: "itertools.count[int]"
    ) -> list[tuple[int, Tensor, int]]:
        drawn: list[tuple[int, Tensor, int]] = []
        for i in range(width):
            member = i % self.members
            full = self.q(path, member)
            own = [token for token, _, m in drawn if m == member]
            left = full.clone()
            if self.kind != "replacement":
                left[own] = 0.0
            if float(left.sum()) <= 0.0:
                continue
            left = left / left.sum()
            if self.kind == "fixed":
                drawn.append((int(left.argmax()), full, member))
            else:
                token = dice.choose(left, Purpose.DRAFT, next(draws))
                drawn.append((token, full if self.kind == "shared_rows" else left, member))
        return drawn
