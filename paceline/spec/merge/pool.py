"""All that was drafted for a request as one tree, each node rated by what every drafter says of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.tree import DraftTree
from paceline.spec.merge.guess import AGREED, CONTESTED, guesses


class Ratings(Protocol):
    """What was learned of one drafter."""

    known: dict[int, float]  # guess -> odds, of those asked for lately

    def odds(self, guess: int) -> float: ...

    def factor(self, request_id: str) -> float: ...  # on the odds, for this request


@dataclass(slots=True)
class Draft:
    """Everything that was drafted for a request: one tree, in which nodes with the same path are one."""

    token_ids: list[int]
    parents: list[int]
    members: list[tuple[str, ...]]  # by node: who drafted it
    guesses: list[tuple[int, ...]]  # by node and drafter, see guess.py
    own: list[float]  # by node: the chance that it is accepted if its parent is, by the drafter who is surest
    chances: list[float]  # by node: that its whole path is accepted
    depth: int = 0
    whole: DraftTree | None = None  # as drafted, where all of it is verified or nothing
    first_chance: float = 0.0  # that the next token is among its first nodes: the best of them, at least

    def gain(self, row_price: float) -> float:
        """Tokens that it brings beyond the price of its rows."""
        if self.whole is not None:
            return max(0.0, sum(self.chances) - row_price * len(self.chances))
        return sum([chance - row_price for chance in self.chances if chance > row_price])

    def outcomes(self, new_token_ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """(node, was it right) of every child on the path that the tokens took."""
        at, parents = -1, self.parents
        for token in new_token_ids:
            following = -1
            for node in range(at + 1, len(parents)):
                if parents[node] == at:
                    hit = self.token_ids[node] == token
                    yield node, hit
                    if hit:
                        following = node
            if following < 0:
                return
            at = following

    def tree(self, keep: Sequence[int]) -> DraftTree:
        whole = DraftTree(self.token_ids, self.parents, members=self.members, confidence=self.own)
        return whole.keep(keep)


def draft_of(name: str, tree: DraftTree, request_id: str, ratings: Ratings, is_whole: bool = False) -> Draft:
    """One drafter's tree, rated."""
    found, depth = guesses(tree)
    factor, known = ratings.factor(request_id), ratings.known
    own: list[float] = []
    chances: list[float] = []
    first = 0.0
    for parent, guess in zip(tree.parents, found, strict=True):
        odds = (known.get(guess) or ratings.odds(guess)) * factor
        chance = odds / (1.0 + odds)
        own.append(chance)
        if parent >= 0:
            chance *= chances[parent]
        elif chance > first:
            first = chance
        chances.append(chance)
    # What was drawn from a distribution of its own must not decide what is offered: that would bias the output.
    whole = tree if is_whole or tree.draft_probs is not None else None
    members: list[tuple[str, ...]] = [(name,)] * len(own)
    said: list[tuple[int, ...]] = [(guess,) for guess in found]
    return Draft(tree.token_ids, tree.parents, members, said, own, chances, depth, whole, first)


def join(drafts: Sequence[Draft], request_id: str, ratings: Mapping[str, Ratings]) -> Draft:
    """Several drafters' trees as one, rated by what they say of each other's nodes as well."""
    if len(drafts) == 1:
        return drafts[0]
    first, *others = drafts
    joined = Draft(list(first.token_ids), list(first.parents), list(first.members), list(first.guesses), [], [])
    tokens, parents, members, said = joined.token_ids, joined.parents, joined.members, joined.guesses
    node_of: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(parents, tokens, strict=True)):
        node_of.setdefault(place, node)
    for draft in others:
        joined_as = [-1]  # the root in front
        for token, parent, who, guess in zip(draft.token_ids, draft.parents, draft.members, draft.guesses, strict=True):
            above = joined_as[parent + 1]
            node = node_of.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                members.append(who)
                said.append(guess)
            else:
                members[node] += who
                said[node] += guess
            joined_as.append(node)
    by: dict[int, tuple[str, ...]] = {}  # node -> who drafted the first of its children
    contested = {parent for parent, who in zip(parents, members, strict=True) if by.setdefault(parent, who) != who}
    rated = {name: (ratings[name], ratings[name].factor(request_id)) for who in set(members) for name in who}
    for node, (parent, who) in enumerate(zip(parents, members, strict=True)):
        opinion = AGREED if len(who) > 1 else CONTESTED if parent in contested else 0
        if opinion:
            said[node] = tuple([guess + opinion for guess in said[node]])
        odds = 0.0
        for name, one in zip(who, said[node], strict=True):
            rating, factor = rated[name]
            odds = max(odds, (rating.known.get(one) or rating.odds(one)) * factor)
        chance = odds / (1.0 + odds)
        joined.own.append(chance)
        joined.chances.append(chance if parent < 0 else chance * joined.chances[parent])
    return joined
