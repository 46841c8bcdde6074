"""One request's place in its grammar.

The matcher stands at the end of the request's output. For a draft tree it is walked depth first: a token is taken, its
node looked at, and taken back, so that every edge of the tree is walked once. Afterwards it stands where it stood.
Grammars that name tokens (control tokens, ids) are walked on copies instead: llguidance 1.9 does not find its way back
over such a token where it was forced. A copy takes 0.1 us for each token of the output.

End tokens never reach the matcher: one may come where the grammar accepts, and after it nothing but end tokens may.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from llguidance import LLMatcher

from paceline.core.constraint import Allowed, Forced
from paceline.core.faults import request_error
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import RequestFailedError

if TYPE_CHECKING:
    from paceline.structured.compiler import TokenView

ROOT = -1
NOTHING_FORCED = Forced([], 0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    matcher: LLMatcher  # at the beginning: to be copied, not used
    names_tokens: bool


class OutputConstraint:
    def __init__(self, compiled: CompiledGrammar, view: "TokenView", request: Request) -> None:
        self._compiled = compiled
        self._view = view
        self._request = request
        self._matcher: LLMatcher | None = None  # made on first use, dropped at the end: many requests may be waiting
        self._num_taken = 0  # output tokens that it has seen
        self._has_ended = False  # an end token is among them
        self._masks: dict[tuple[int, ...], bytes] = {}  # after these draft tokens; bits, one a token
        self._masks_at = -1  # the length of the output that they are for
        self._failure: RequestFailedError | None = None

    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        path = tuple(draft_ids)
        is_prepared = self._masks_at == self._request.num_output_tokens and path in self._masks
        if not is_prepared and self._failure is None:
            self.prepare(DraftTree.chain(path))
        if self._failure is not None:
            raise self._failure
        bits = self._masks.get(path)
        if bits is None:
            return np.ones(self._view.vocab_size, dtype=bool)
        if not bits:
            return self._view.only_eos
        unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=self._view.vocab_size)
        mask: Allowed = unpacked.view(np.bool_)
        return mask

    def prepare(self, tree: DraftTree) -> None:
        if self._masks_at != self._request.num_output_tokens:
            self._masks = {}
            self._masks_at = self._request.num_output_tokens
        self._guarded(lambda matcher: self._make_masks(matcher, tree), None)

    def prune(self, tree: DraftTree) -> DraftTree:
        """A node with a distribution of its own stays although it cannot come: its rule rejects it, and what is emitted
        then is not what would be emitted had nothing been drafted. Nothing can come after it either way."""
        if not tree.token_ids:
            return tree
        return self._guarded(lambda matcher: self._pruned(matcher, tree), EMPTY_TREE)

    def forced(self, max_tokens: int) -> Forced:
        return self._guarded(lambda matcher: self._forced(matcher, max_tokens), NOTHING_FORCED)

    def of_request(self, request: Request) -> "OutputConstraint":
        return OutputConstraint(self._compiled, self._view, request)

    def close(self) -> None:
        self._matcher = None
        self._masks = {}
        self._masks_at = -1

    def fail(self, error: RequestFailedError) -> None:
        """From now on none of its rows can be sampled; the matcher may still be in use in another thread."""
        self._failure = error

    def _guarded(self, ask: Callable[[LLMatcher], T], otherwise: T) -> T:
        """What fails here is told where the request's next token is chosen: it ends this request only."""
        if self._failure is None:
            try:
                return ask(self._at_end_of_output())
            except BaseException as raised:
                self._failure = request_error("following its grammar", raised)
        return otherwise

    def _at_end_of_output(self) -> LLMatcher:
        """The matcher, after it has taken what is new in the output."""
        request = self._request
        if self._matcher is None or self._num_taken > request.num_output_tokens:
            self._matcher, self._num_taken, self._has_ended = self._compiled.matcher.deep_copy(), 0, False
        for token in request.token_ids[request.num_prompt_tokens + self._num_taken :]:
            self._has_ended = self._has_ended or token in self._view.eos_token_ids
            if not self._has_ended and self._matcher.try_consume_tokens([token]) != 1:
                raise RequestFailedError(f"its grammar does not allow token {token}: {self._matcher.get_error()}")
            self._num_taken += 1
        return self._matcher

    def _make_masks(self, matcher: LLMatcher, tree: DraftTree) -> None:
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        for node, ended, there in self._walk(matcher, tree):
            if node != ROOT:
                paths[node] = (*paths[tree.parents[node]], tree.token_ids[node])
            if paths[node] not in self._masks:
                self._masks[paths[node]] = b"" if ended else _bits(there)

    def _pruned(self, matcher: LLMatcher, tree: DraftTree) -> DraftTree:
        kept = {node for node, _, _ in self._walk(matcher, tree, looks_at_forced=True)}
        if tree.draft_probs is not None:
            kept.update(node for node, parent in enumerate(tree.parents) if parent in kept and node not in kept)
        return tree.keep(sorted(kept - {ROOT}))

    def _walk(
        self, matcher: LLMatcher, tree: DraftTree, *, looks_at_forced: bool = False
    ) -> Iterator[tuple[int, bool, LLMatcher]]:
        """The nodes that can come, the root first: each with whether the text has ended and a matcher that is there.

        `looks_at_forced`: where only one spelling is allowed of several that the grammar can read, that one alone."""
        children = _children(tree)
        eos = self._view.eos_token_ids
        copies = self._compiled.names_tokens
        path: list[_Place] = []
        entered: tuple[int, bool, LLMatcher] | None = (ROOT, self._has_ended, matcher)
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
            if token in eos:
                if place.ended or place.matcher.is_accepting():
                    entered = (child, True, place.matcher)
            elif not place.ended and (not place.forced or token == place.forced[0]):
                there = place.matcher.deep_copy() if copies else matcher
                if there.try_consume_tokens([token]) == 1:
                    entered = (child, False, there)

    def _forced(self, matcher: LLMatcher, max_tokens: int) -> Forced:
        if self._has_ended:
            return NOTHING_FORCED
        if self._compiled.names_tokens:
            matcher = matcher.deep_copy()
        tokens: list[int] = []
        while len(tokens) < max_tokens and (new := matcher.compute_ff_tokens()):
            taken = matcher.try_consume_tokens(new)
            tokens += new[:taken]
            if taken < len(new):
                break
        num_taken = num_certain = len(tokens)
        if matcher.is_stopped():
            tokens.append(min(self._view.eos_token_ids))
            num_certain += len(self._view.eos_token_ids) == 1
        elif forced_bytes := matcher.compute_ff_bytes():
            spelled = self._view.tokenizer.tokenize_bytes(forced_bytes)
            tokens += spelled[: matcher.validate_tokens(spelled)]
        if not self._compiled.names_tokens:
            matcher.rollback(num_taken)
        return Forced(tokens[:max_tokens], min(num_certain, max_tokens))


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


def _bits(matcher: LLMatcher) -> bytes:
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestFailedError(f"its grammar cannot go on: {matcher.get_error()}")
    return bits
