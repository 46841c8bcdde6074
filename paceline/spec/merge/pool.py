"""All that was drafted for a request as one tree, each node with its chance by the drafter who is surest of it."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.tree import DraftTree
from paceline.spec.merge.guess import guesses

PRICES = (0.0, 0.1, 0.3, 0.6, 1.0)  # of a row, in tokens, at which a draft's gain is computed: between them, lines

LONGEST_CHAIN = 256
CHAIN = list(range(-1, LONGEST_CHAIN - 1))  # most drafts are one
DEPTHS_OF_CHAIN, RANKS_OF_CHAIN = list(range(1, LONGEST_CHAIN + 1)), [0] * LONGEST_CHAIN


class Ratings(Protocol):
    """What was learned of one drafter."""

    known: dict[int, float]  # guess -> odds, of those asked for lately

    def odds(self, guess: int) -> float: ...

    def factor(self, request_id: str) -> float: ...  # on the odds, for this request


@dataclass(slots=True)
class Draft:
    """What was drafted for a request: one tree, in which nodes with the same path are one."""

    token_ids: list[int]
    parents: list[int]
    members: list[tuple[str, ...]]  # by node: who drafted it
    guesses: list[tuple[int, ...]]  # by node and drafter, see guess.py
    own: list[float]  # by node: the chance that it is accepted if its parent is
    chances: list[float]  # by node: that its whole path is accepted
    depth: int = 0
    whole: DraftTree | None = None  # as drafted, where all of it is verified or nothing
    first_chance: float = 0.0  # that the next token is among its first nodes: the best of them, at least

    def gains(self) -> list[float]:
        """Tokens that it brings beyond the price of its rows, at each of PRICES."""
        if self.whole is not None:
            tokens, rows = sum(self.chances), len(self.chances)
            return [max(0.0, tokens - price * rows) for price in PRICES]
        _, low, middle, high, _ = PRICES
        free = at_low = at_middle = at_high = 0.0
        for chance in self.chances:
            free += chance
            if chance > low:
                at_low += chance - low
                if chance > middle:
                    at_middle += chance - middle
                    if chance > high:
                        at_high += chance - high
        return [free, at_low, at_middle, at_high, 0.0]

    def outcomes(self, new_token_ids: Sequence[int]) -> dict[str, list[tuple[int, bool]]]:
        """Drafter -> (guess, was it right) of each child of its own on the path that the tokens took."""
        found: dict[str, list[tuple[int, bool]]] = {}
        at, parents = -1, self.parents
        for token in new_token_ids:
            following = -1
            for node in range(at + 1, len(parents)):
                if parents[node] == at:
                    hit = self.token_ids[node] == token
                    for member, guess in zip(self.members[node], self.guesses[node], strict=True):
                        found.setdefault(member, []).append((guess, hit))
                    if hit:
                        following = node
            if following < 0:
                break
            at = following
        return found

    def tree(self, keep: Sequence[int]) -> DraftTree:
        count = len(keep)
        if keep and keep[-1] == count - 1:  # the first ones, as most often
            return DraftTree(self.token_ids[:count], self.parents[:count], None, self.members[:count], self.own[:count])
        return DraftTree(self.token_ids, self.parents, None, self.members, self.own).keep(keep)


def draft_of(name: str, tree: DraftTree, request_id: str, ratings: Ratings, is_whole: bool = False) -> Draft:
    """One drafter's tree, rated."""
    parents, count = tree.parents, len(tree.parents)
    is_chain = parents == CHAIN[:count]
    depths, ranks = (DEPTHS_OF_CHAIN[:count], RANKS_OF_CHAIN[:count]) if is_chain else _places(parents)
    confidence = tree.confidence or [0.5 ** (1 + rank) for rank in ranks]
    found = guesses(confidence, depths, ranks)
    factor, known, rate = ratings.factor(request_id), ratings.known, ratings.odds
    odds = [factor * (known.get(guess) or rate(guess)) for guess in found]
    own = [one / (1.0 + one) for one in odds]
    if is_chain:
        chances, first = list(itertools.accumulate(own, operator.mul)), own[0] if own else 0.0
    else:
        chances, first = [], 0.0
        for parent, chance in zip(parents, own, strict=True):
            first = max(first, chance) if parent < 0 else first
            chances.append(chance if parent < 0 else chance * chances[parent])
    # What was drawn from a distribution of its own must not decide what is offered: that would bias the output.
    whole = tree if is_whole or tree.draft_probs is not None else None
    members: list[tuple[str, ...]] = [(name,)] * count
    said: list[tuple[int, ...]] = list(zip(found))
    return Draft(tree.token_ids, parents, members, said, own, chances, max(depths, default=0), whole, first)


def _places(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each node its depth and its rank among its siblings."""
    depths: list[int] = []
    ranks: list[int] = []
    num_children: dict[int, int] = {}
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
        rank = num_children.get(parent, 0)
        ranks.append(rank)
        num_children[parent] = rank + 1
    return depths, ranks


def join(drafts: Sequence[Draft]) -> Draft:
    """Several drafters' trees as one."""
    if len(drafts) == 1:
        return drafts[0]
    first, *others = drafts
    tokens, parents, members = list(first.token_ids), list(first.parents), list(first.members)
    said, own, chances = list(first.guesses), list(first.own), list(first.chances)
    node_of: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(parents, tokens, strict=True)):
        node_of.setdefault(place, node)
    for draft in others:
        joined_as = [-1]  # the root in front
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            above, chance = joined_as[parent + 1], draft.own[node]
            at = node_of.setdefault((above, token), len(tokens))
            joined_as.append(at)
            if at == len(tokens):
                tokens.append(token)
                parents.append(above)
                members.append(draft.members[node])
                said.append(draft.guesses[node])
                own.append(chance)
                chances.append(chance)
            else:
                members[at] += draft.members[node]
                said[at] += draft.guesses[node]
                own[at] = max(own[at], chance)
    for node, parent in enumerate(parents):  # a parent may have become likelier
        chances[node] = own[node] if parent < 0 else own[node] * chances[parent]
    return Draft(tokens, parents, members, said, own, chances)
