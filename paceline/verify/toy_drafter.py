"""A drafter with random distributions of its own, for enumeration: its draws go through the dice as well."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from paceline.core.tree import DraftTree
from paceline.ops.random import Purpose
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice


@dataclass
class ToyDrafter:
    """Every node at depth d gets `shape[d]` children, drawn by `num_members` drafters in turn.

    kind   replacement      siblings are drawn with replacement
           no_replacement   without, and every row is what was left to draw from
           shared_rows      without, but all siblings of a drafter carry its full row
           fixed            the likeliest tokens; no q
           hub_pairs        SpecHub's pairs around the likeliest token"""

    vocab_size: int
    seed: int
    shape: Sequence[int]
    kind: str = "replacement"
    num_members: int = 1

    def q(self, path: Sequence[int], member: int) -> Probs:
        """The distribution after a path; some have holes."""
        weights: Probs = np.random.default_rng([self.seed, member, *path]).dirichlet(np.ones(self.vocab_size))
        weights[weights < 0.05] = 0.0
        weights /= weights.sum()
        return weights

    def __call__(self, dice: Dice) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[Probs] = []
        members: list[tuple[str, ...]] = []
        level: list[tuple[int, list[int]]] = [(-1, [])]
        draws = count()
        for width in self.shape:
            below: list[tuple[int, list[int]]] = []
            for node, path in level:
                for token, row, member in self._children(path, width, dice, draws):
                    below.append((len(tokens), [*path, token]))
                    tokens.append(token)
                    parents.append(node)
                    rows.append(row)
                    members.append((f"drafter {member}",))
            level = below
        probs = torch.from_numpy(np.stack(rows)) if rows and self.kind != "fixed" else None
        return DraftTree(tokens, parents, probs, members)

    def _children(
        self, path: Sequence[int], width: int, dice: Dice, draws: Iterator[int]
    ) -> list[tuple[int, Probs, int]]:
        if self.kind == "hub_pairs":
            return self._hub_pair(self.q(path, 0), dice, draws)
        children: list[tuple[int, Probs, int]] = []
        for i in range(width):
            member = i % self.num_members
            full = self.q(path, member)
            left = full.copy()
            if self.kind != "replacement":
                left[[token for token, _, m in children if m == member]] = 0.0
            if left.sum() <= 0.0:
                continue
            left /= left.sum()
            token = int(left.argmax()) if self.kind == "fixed" else dice.choose(left, Purpose.DRAFT, next(draws))
            children.append((token, full if self.kind == "shared_rows" else left, member))
        return children

    @staticmethod
    def _hub_pair(q: Probs, dice: Dice, draws: Iterator[int]) -> list[tuple[int, Probs, int]]:
        hub = int(q.argmax())
        others = q.copy()
        others[hub] = 0.0
        first = dice.choose(q, Purpose.DRAFT, next(draws))
        pair = [first]
        if first != hub:
            pair.append(hub)
        elif others.sum() > 0.0:
            pair.append(dice.choose(others, Purpose.DRAFT, next(draws)))
        return [(token, q, 0) for token in pair]
