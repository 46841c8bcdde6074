"""One request's place in its grammar.

The matcher stands at the end of the request's output, or behind draft tokens that it was last asked about: mostly these
become output, and are then already taken.

A mask says of every token whether it may come. To make it takes some five times as long as to ask about one token, to
apply it longer still. So there are both: `settled` for whoever wants a certain token, `allowed` for whoever needs all.

End tokens never reach the matcher: one may come where the grammar accepts, and after it nothing but end tokens may.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from llguidance import LLMatcher

from paceline.core.constraint import Allowed, Forced
from paceline.core.faults import request_error
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import GrammarLimitError, RequestFailedError
from paceline.structured.tree_walk import ROOT, Visit, walk

if TYPE_CHECKING:
    from paceline.structured.compiler import TokenView

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
        self._ahead: list[int] = []  # draft tokens that it has seen after them
        self._masks: dict[tuple[int, ...], bytes] = {}  # after these draft tokens; bits, one a token
        self._masks_at = -1  # the length of the output that they are for
        self._failure: RequestFailedError | None = None

    def settled(self, draft_ids: Sequence[int], token: int) -> int | None:
        eos = self._view.eos_token_ids
        if not self.is_quick_to_ask or not eos.isdisjoint(draft_ids) or self._is_prepared(tuple(draft_ids)):
            return token if self.allowed(draft_ids)[token] else None
        return self._guarded(lambda: self._settled(draft_ids, token), None)

    @property
    def is_quick_to_ask(self) -> bool:
        return not self._compiled.names_tokens

    def allowed(self, draft_ids: Sequence[int]) -> Allowed:
        path = tuple(draft_ids)
        if not self._is_prepared(path) and self._failure is None:
            begin_s = time.perf_counter()
            self.prepare(DraftTree.chain(path))
            self._view.late_masks.add(time.perf_counter() - begin_s)
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
        self._guarded(lambda: self._make_masks(self._at_end_of_output(), tree), None)

    def prune(self, tree: DraftTree) -> DraftTree:
        """A node with a distribution of its own stays although it cannot come: its rule rejects it, and what is emitted
        then is not what would be emitted had nothing been drafted. Nothing can come after it either way."""
        if not tree.token_ids:
            return tree
        return self._guarded(lambda: self._pruned(self._at_end_of_output(), tree), EMPTY_TREE)

    def forced(self, max_tokens: int) -> Forced:
        return self._guarded(lambda: self._forced(self._at_end_of_output(), max_tokens), NOTHING_FORCED)

    def of_request(self, request: Request) -> "OutputConstraint":
        return OutputConstraint(self._compiled, self._view, request)

    def close(self) -> None:
        self._matcher = None
        self._ahead = []
        self._masks = {}
        self._masks_at = -1

    def fail(self, error: RequestFailedError) -> None:
        """From now on none of its rows can be sampled; the matcher may still be in use in another thread."""
        self._failure = error

    def _guarded(self, ask: Callable[[], T], otherwise: T) -> T:
        """What fails here is told where the request's next token is chosen: it ends this request only."""
        if self._failure is None:
            try:
                return ask()
            except BaseException as raised:
                self._failure = request_error("following its grammar", raised)
        return otherwise

    def _is_prepared(self, path: tuple[int, ...]) -> bool:
        return self._masks_at == self._request.num_output_tokens and path in self._masks

    def _settled(self, path: Sequence[int], token: int) -> int | None:
        """A token that may come is taken by the matcher: mostly the output goes on with it."""
        matcher = self._matcher
        if matcher is None or self._num_taken != self._request.num_output_tokens:
            matcher = self._at_end_of_output()
        if self._has_ended and not path:
            return self._settled_end(token)
        if self._has_ended or not self._go_to(matcher, path):
            return token  # as the mask of what no output can reach
        token = next(iter(matcher.compute_ff_tokens()), token)
        if matcher.is_accepting() and (matcher.is_stopped() or token in self._view.eos_token_ids):
            return self._settled_end(token)
        if token in self._view.eos_token_ids or matcher.try_consume_tokens([token]) != 1:
            return None
        self._ahead.append(token)
        return token

    def _settled_end(self, token: int) -> int | None:
        """Where an end token may come, and `token` is one or nothing else may."""
        eos = self._view.eos_token_ids
        if token in eos:
            return token
        return min(eos) if len(eos) == 1 else None

    def _go_to(self, matcher: LLMatcher, path: Sequence[int]) -> bool:
        """Behind these draft tokens; False where they cannot come."""
        rest = list(path[self._go_back(matcher, path) :])
        num_taken = matcher.try_consume_tokens(rest) if rest else 0
        self._ahead += rest[:num_taken]
        return num_taken == len(rest)

    def _go_back(self, matcher: LLMatcher, path: Sequence[int]) -> int:
        """Take back draft tokens that are not the beginning of `path`; how many are left."""
        num_common = 0
        for mine, theirs in zip(self._ahead, path, strict=False):
            if mine != theirs:
                break
            num_common += 1
        if num_common < len(self._ahead):
            matcher.rollback(len(self._ahead) - num_common)
            del self._ahead[num_common:]
        return num_common

    def _at_end_of_output(self) -> LLMatcher:
        """The matcher, after it has taken what is new in the output."""
        request = self._request
        if self._matcher is None or self._num_taken > request.num_output_tokens:
            self._matcher, self._num_taken, self._has_ended = self._compiled.matcher.deep_copy(), 0, False
            self._ahead = []
        if self._ahead:
            self._num_taken += self._go_back(
                self._matcher, request.token_ids[request.num_prompt_tokens + self._num_taken :]
            )
            self._ahead = []
        for token in request.token_ids[request.num_prompt_tokens + self._num_taken :]:
            self._has_ended = self._has_ended or token in self._view.eos_token_ids
            if not self._has_ended and self._matcher.try_consume_tokens([token]) != 1:
                if self._matcher.is_error():
                    raise _too_costly(self._matcher)
                raise RequestFailedError(f"its grammar does not allow token {token}")
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

    def _walk(self, matcher: LLMatcher, tree: DraftTree, *, looks_at_forced: bool = False) -> Iterator[Visit]:
        return walk(
            matcher,
            tree,
            self._view.eos_token_ids,
            has_ended=self._has_ended,
            copies=self._compiled.names_tokens,
            looks_at_forced=looks_at_forced,
        )

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


def _bits(matcher: LLMatcher) -> bytes:
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise _too_costly(matcher)
    return bits


def _too_costly(matcher: LLMatcher) -> GrammarLimitError:
    reason = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    return GrammarLimitError(
        f"to say what may come next takes more than one step may ({reason}). Use fewer or simpler patterns"
    )
