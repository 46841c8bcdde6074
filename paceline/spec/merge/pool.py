"""A draft with the chances of its paths; and several drafters' drafts for one request as one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.tree import DraftTree

PRICES = (0.0, 0.1, 0.3, 0.6, 0.8, 1.0)  # of a row, in tokens, at which a draft's gain is computed: between them, lines


@dataclass(slots=True)
class Draft:
    name: str  # of its drafter
    tree: DraftTree
    buckets: list[int]  # by node: what the drafter said of its path, see lab/live_acceptance.py
    chances: list[float]  # by node: that its whole path is accepted
    first_chance: float = 0.0  # that the next token is among its first nodes: the best of them, at least

    def offer(self, bar: float, num_nodes: int) -> DraftTree:
        """The paths from this chance on, the likeliest ones where those are more than so many."""
        tree, chances = self.tree, self.chances
        keep = [node for node, chance in enumerate(chances) if chance >= bar]
        if len(keep) > num_nodes:
            keep = sorted(sorted(keep, key=lambda node: -chances[node])[:num_nodes])
        return tree.keep(keep)


def rate(name: str, tree: DraftTree, table: Sequence[float]) -> Draft:
    """One drafter's tree. `table`: the chance of a path, by what the drafter says of it."""
    parents, num_buckets = tree.parents, len(table) - 1
    confidence = tree.confidence or [0.5] * len(parents)
    buckets: list[int] = []
    chances: list[float] = []
    first = 0.0
    if parents[-1] == len(parents) - 2 and tree.is_chain:
        path = 1.0
        for sure in confidence:
            path *= sure
            bucket = int(math.sqrt(path) * num_buckets)
            buckets.append(bucket)
            chances.append(table[bucket])
        first = chances[0]
    else:
        paths: list[float] = []
        for parent, sure in zip(parents, confidence, strict=True):
            path = sure if parent < 0 else sure * paths[parent]
            bucket = int(math.sqrt(path) * num_buckets)
            paths.append(path)
            buckets.append(bucket)
            chances.append(table[bucket])
            if parent < 0 and table[bucket] > first:
                first = table[bucket]
    return Draft(name, tree, buckets, chances, first)


def join(drafts: Sequence[Draft]) -> Draft:
    """Several drafters' trees as one, the surest drafter's first. Nodes with the same path are one and have the better
    chance; a path that another drafter did not think of is right only where that one's are wrong."""
    tokens: list[int] = []
    parents: list[int] = []
    members: list[tuple[str, ...]] = []
    chances: list[float] = []
    node_of: dict[tuple[int, int], int] = {}
    taken: dict[int, float] = {}  # node -> the chance that one of its children, of the drafts before, is right
    for draft in sorted(drafts, key=lambda one: -one.first_chance):
        joined_as, factors, own = [-1], [1.0], (draft.name,)  # the root in front
        first = len(tokens)
        for token, parent, chance in zip(draft.tree.token_ids, draft.tree.parents, draft.chances, strict=True):
            above, factor = joined_as[parent + 1], factors[parent + 1]
            at = node_of.setdefault((above, token), len(tokens))
            if at == len(tokens):
                if above in taken:
                    factor *= max(0.0, 1.0 - taken[above] / (chances[above] if above >= 0 else 1.0))
                tokens.append(token)
                parents.append(above)
                members.append(own)
                chances.append(factor * chance)
            elif draft.name not in members[at]:
                members[at] += own
                higher = at
                while higher >= 0 and chances[higher] < factor * chance:  # a path is never likelier than its beginning
                    chances[higher] = factor * chance
                    higher = parents[higher]
            joined_as.append(at)
            factors.append(factor)
        for node in range(first, len(tokens)):
            taken[parents[node]] = taken.get(parents[node], 0.0) + chances[node]
    return Draft("", DraftTree(tokens, parents, None, members), [], chances)


def gains(chances: Sequence[float]) -> list[float]:
    """Tokens that paths of these chances bring beyond the price of their rows, at each of PRICES."""
    _, low, middle, high, highest, _ = PRICES
    free = at_low = at_middle = at_high = at_highest = 0.0
    for chance in chances:
        free += chance
        if chance > low:
            at_low += chance - low
            if chance > middle:
                at_middle += chance - middle
                if chance > high:
                    at_high += chance - high
                    if chance > highest:
                        at_highest += chance - highest
    return [free, at_low, at_middle, at_high, at_highest, 0.0]
