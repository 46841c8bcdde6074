"""How often a guess of some kind turned out right, learned as outputs go by."""

from collections.abc import Iterator, Sequence

from paceline.core.tree import DraftTree


class Reliability:
    """Hit rates by the length of the match that a guess rests on.

    Until there is evidence, a longer match is trusted more: length / (length + 1)."""

    PRIOR_STRENGTH = 8.0  # guesses that the prior counts for
    MEMORY = 2000.0  # guesses after which old evidence has faded by half

    def __init__(self, max_length: int) -> None:
        self._hits = [self.PRIOR_STRENGTH * n / (n + 1.0) for n in range(max_length + 1)]
        self._guesses = [self.PRIOR_STRENGTH] * (max_length + 1)

    def rate(self, length: int) -> float:
        return self._hits[length] / self._guesses[length]

    def record(self, length: int, hit: bool) -> None:
        if self._guesses[length] > self.MEMORY:
            self._guesses[length] *= 0.5
            self._hits[length] *= 0.5
        self._guesses[length] += 1.0
        self._hits[length] += hit


def walk(tree: DraftTree, new_token_ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """(first child, was it right) for every node of the tree that the emitted tokens went through, root included.

    It needs no verdict: a tree that was never verified is judged as well, by the tokens that came."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    at = -1
    for token in new_token_ids:
        here = children.get(at)
        if not here:
            return
        yield here[0], tree.token_ids[here[0]] == token
        at = next((node for node in here if tree.token_ids[node] == token), -2)
