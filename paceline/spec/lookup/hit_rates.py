"""How often a guess of some kind turned out right, learned as outputs go by."""

from array import array
from collections.abc import Iterator, Sequence

from paceline.core.tree import DraftTree


class Reliability:
    """Hit rates by the length of the match that a guess comes from.

    Until there is evidence, a longer match is trusted more: length / (length + 1)."""

    PRIOR_STRENGTH = 8.0  # guesses that the prior counts for
    MEMORY = 2000.0  # guesses after which old evidence has faded by half

    def __init__(self, max_length: int) -> None:
        # Arrays, which keep their place: native code reads the rates too.
        self.hits = array("d", [self.PRIOR_STRENGTH * n / (n + 1.0) for n in range(max_length + 1)])
        self.guesses = array("d", [self.PRIOR_STRENGTH] * (max_length + 1))

    def rate(self, length: int) -> float:
        return self.hits[length] / self.guesses[length]

    def record(self, length: int, hit: bool) -> None:
        if self.guesses[length] > self.MEMORY:
            self.guesses[length] *= 0.5
            self.hits[length] *= 0.5
        self.guesses[length] += 1.0
        self.hits[length] += hit


def walk(tree: DraftTree, new_token_ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """(first child, was it right) for every node of the tree that the emitted tokens went through, root included.

    It needs no verdict: a tree that was never verified is judged as well, by the tokens that came."""
    token_ids, parents = tree.token_ids, tree.parents
    at = -1
    for token in new_token_ids:
        child = _next_child(parents, at, at)
        if child < 0:
            return
        yield child, token_ids[child] == token
        while token_ids[child] != token:
            child = _next_child(parents, at, child)
            if child < 0:
                return
        at = child


def _next_child(parents: list[int], parent: int, node: int) -> int:
    """The first child of `parent` after `node`, or -1. Parents come before their children."""
    try:
        return parents.index(parent, node + 1)
    except ValueError:
        return -1
