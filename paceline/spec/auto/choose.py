"""Which nodes go into the next pass. The one rule: a thing is bought iff it is expected to bring more tokens than its
seconds are worth, at the batch's present tokens per second.

A node brings the chance that its whole path is accepted, and takes a row of the pass. All requests' nodes are ranked
together by that chance (a parent never ranks below its child, so any first n of them are trees); the first n are bought
for the n with the largest surplus

    sum of the n largest chances - rate x (T(rows + n) - T(rows))

On a smooth curve this keeps each node that is worth its own row. On one with steps, as where passes are padded to
captured sizes, it fills the size that pays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.tree import DraftTree
from paceline.lab.live_pass_cost import PassCostModel
from paceline.spec.auto.acceptance import AGREED, BUCKETS, CONTESTED, Acceptance, guesses

LEAST_CHANCE = 1.0 / BUCKETS  # of a path; what is known is not exact enough to tell smaller ones apart


@dataclass(slots=True)
class Draft:
    """Everything that was drafted for a request: one tree, in which nodes with the same path are one."""

    token_ids: list[int]
    parents: list[int]
    members: list[tuple[str, ...]]  # by node: who drafted it
    guesses: list[tuple[int, ...]]  # by node and drafter, see acceptance.py
    own: list[float]  # by node: the chance that it is accepted if its parent is, by the drafter who is surest
    chances: list[float]  # by node: that its whole path is accepted
    depth: int = 0
    whole: DraftTree | None = None  # as drafted, where all of it is verified or nothing

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


def draft_of(name: str, tree: DraftTree, request_id: str, acceptance: Acceptance, is_whole: bool = False) -> Draft:
    """One drafter's tree, rated."""
    found, depth = guesses(tree)
    factor, odds_of = acceptance.factor(request_id), acceptance.odds
    own: list[float] = []
    chances: list[float] = []
    for parent, guess in zip(tree.parents, found, strict=True):
        odds = odds_of(guess) * factor
        chance = odds / (1.0 + odds)
        own.append(chance)
        chances.append(chance if parent < 0 else chance * chances[parent])
    # What was drawn from a distribution of its own must not decide what is offered: that would bias the output.
    whole = tree if is_whole or tree.draft_probs is not None else None
    return Draft(
        tree.token_ids, tree.parents, [(name,)] * len(own), [(guess,) for guess in found], own, chances, depth, whole
    )


def join(drafts: Sequence[Draft], request_id: str, acceptance: dict[str, Acceptance]) -> Draft:
    """Several drafters' trees as one, rated by what they say of each other's nodes as well."""
    if len(drafts) == 1:
        return drafts[0]
    joined = Draft([], [], [], [], [], [])
    node_of: dict[tuple[int, int], int] = {}
    firsts: dict[int, set[str]] = {}  # node -> who gave it children
    for draft in drafts:
        joined_as = [-1]  # the root in front
        for token, parent, who, guess in zip(draft.token_ids, draft.parents, draft.members, draft.guesses, strict=True):
            above = joined_as[parent + 1]
            firsts.setdefault(above, set()).update(who)
            node = node_of.setdefault((above, token), len(joined.token_ids))
            if node == len(joined.token_ids):
                joined.token_ids.append(token)
                joined.parents.append(above)
                joined.members.append(who)
                joined.guesses.append(guess)
            else:
                joined.members[node] += who
                joined.guesses[node] += guess
            joined_as.append(node)
    factors = {name: one.factor(request_id) for name, one in acceptance.items()}
    for node, (parent, who) in enumerate(zip(joined.parents, joined.members, strict=True)):
        others = AGREED if len(who) > 1 else CONTESTED if len(firsts[parent]) > 1 else 0
        said = joined.guesses[node] = tuple([guess + others for guess in joined.guesses[node]])
        odds = max([acceptance[name].odds(guess) * factors[name] for name, guess in zip(who, said, strict=True)])
        chance = odds / (1.0 + odds)
        joined.own.append(chance)
        joined.chances.append(chance if parent < 0 else chance * joined.chances[parent])
    return joined


@dataclass(slots=True)
class Choice:
    keep: list[list[int]]  # per tree: the nodes bought, ascending
    num_nodes: int
    tokens: float  # expected of them
    seconds: float  # that their rows take


def choose(
    chances: Sequence[Sequence[float]],  # per tree: of each node's whole path
    num_requests: int,  # in the next pass, with or without a tree
    cost: PassCostModel,
    tokens_per_s: float,
    discount: float = 1.0,  # on the rows' price, to find out whether they cost what they seem to
) -> Choice:
    ranked = [
        (-chance, i, node)
        for i, tree in enumerate(chances)
        for node, chance in enumerate(tree)
        if chance > LEAST_CHANCE
    ]
    ranked.sort()  # at equal chance a parent stands before its child, because its number is smaller
    seconds = cost.between(num_requests, num_requests + len(ranked), num_requests)
    plain_s, price = seconds[0], discount * tokens_per_s
    tokens = most = bought_tokens = 0.0
    best = 0
    for count, (negative, _, _) in enumerate(ranked, 1):
        tokens -= negative
        surplus = tokens - price * (seconds[count] - plain_s)
        if surplus > most:
            best, most, bought_tokens = count, surplus, tokens
    keep: list[list[int]] = [[] for _ in chances]
    for _, i, node in ranked[:best]:
        keep[i].append(node)
    for nodes in keep:
        nodes.sort()
    return Choice(keep, best, bought_tokens, seconds[best] - plain_s)
