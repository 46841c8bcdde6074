"""A draft tree, walked depth first by one matcher: a token is taken, its node looked at, and the token taken back.

Every edge is walked once, and afterwards the matcher stands where it stood. Grammars that name tokens (control tokens,
ids) are walked on copies instead: llguidance 1.9 does not find its way back over such a token where it was forced. A
copy takes 0.1 us for each token of the output.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from llguidance import LLMatcher

from paceline.core.tree import DraftTree

ROOT = -1


class Visit(NamedTuple):
    node: int
    ended: bool  # an end token is on the path
    matcher: LLMatcher  # stands at the node


def walk(
    matcher: LLMatcher,
    tree: DraftTree,
    eos_token_ids: Collection[int],
    *,
    has_ended: bool,  # before the tree
    copies: bool,
    looks_at_forced: bool = False,
) -> Iterator[Visit]:
    """The nodes that can come, the root first.

    `looks_at_forced`: where only one spelling is allowed of several that the grammar can read, that one alone."""
    children = _children(tree)
    path: list[_Place] = []
    entered: Visit | None = Visit(ROOT, has_ended, matcher)
    while entered is not None or path:
        if entered is not None:
            yield entered
            node, ended, here = entered
            forced = here.compute_ff_tokens()[:1] if looks_at_forced and children[node] and not ended else []
            path.append(_Place(*entered, iter(children[node]), forced))
            entered = None
        place = path[-1]
        child = next(place.waiting, None)
        if child is None:
            path.pop()
            if place.node != ROOT and not place.ended and not copies:
                matcher.rollback(1)
            continue
        token = tree.token_ids[child]
        if token in eos_token_ids:
            if place.ended or place.matcher.is_accepting():
                entered = Visit(child, True, place.matcher)
        elif not place.ended and (not place.forced or token == place.forced[0]):
            there = place.matcher.deep_copy() if copies else matcher
            if there.try_consume_tokens([token]) == 1:
                entered = Visit(child, False, there)


class _Place(NamedTuple):
    """A node on the path from the root to where the walk is."""

    node: int
    ended: bool
    matcher: LLMatcher
    waiting: Iterator[int]  # children to come
    forced: list[int]  # the only token that may follow, where there is one


def _children(tree: DraftTree) -> list[list[int]]:
    """For each node, and at [ROOT] for the root."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        children[parent].append(node)
    return children
