"""What a choice gained since the client last heard of it.

The engine hands out whole states and a slow reader may skip some; a cursor per choice turns any two states into the
text, tokens and log-probabilities between them. A whole answer is the delta from nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.outputs import CompletionOutput, TokenLogprobs
from paceline.core.tokenizer import Tokenizer

DRAFT = "draft"  # the engine's word for a node of a tree that has one drafter
CONTEXT = 6  # tokens kept before the new one: a byte-level token may finish a character that began before it


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token for the playground: its share of the text, and where it came from (CompletionOutput.token_sources)."""

    id: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    first: bool
    text: str
    num_new_tokens: int
    text_offset: int  # characters of this choice before this delta
    logprobs: list[TokenLogprobs] | None
    pieces: list[TokenPiece] | None
    finish_reason: str | None
    stop_reason: str | int | None


class Cursor:
    """How much of one choice was already sent. `method`, where sources are wanted: who drafts for this choice."""

    def __init__(self, index: int, tokenizer: Tokenizer, method: str | None = None) -> None:
        self.num_tokens = 0
        self._index = index
        self._first = True
        self._done = False  # the end was told
        self._num_chars = 0
        self._tokenizer = tokenizer
        self._method = method
        self._window: list[int] = []  # [_shown, end) has not become text yet
        self._shown = 0

    def advance(self, state: CompletionOutput) -> Delta | None:
        """The delta up to `state`, or None where there is nothing to tell."""
        if self._done:  # other choices of the call still run
            return None
        new_token_ids = state.token_ids[self.num_tokens :]
        text = state.text[self._num_chars :]
        pieces = None if self._method is None else self._pieces(new_token_ids, state.token_sources, self._method)
        tells_tokens = state.logprobs is not None or pieces is not None
        if not text and not (new_token_ids and tells_tokens) and state.finish_reason is None:
            return None
        logprobs = None if state.logprobs is None else state.logprobs[self.num_tokens : len(state.token_ids)]
        delta = Delta(
            self._index, self._first, text, len(new_token_ids), self._num_chars, logprobs, pieces,
            state.finish_reason, state.stop_reason,
        )  # fmt: skip
        self._first, self._done = False, state.finish_reason is not None
        self.num_tokens = len(state.token_ids)
        self._num_chars = len(state.text)
        return delta

    def _pieces(self, token_ids: Sequence[int], sources: Sequence[str], method: str) -> list[TokenPiece]:
        new_sources = sources[self.num_tokens : self.num_tokens + len(token_ids)]
        return [
            TokenPiece(token, self._piece(token), method if source == DRAFT else source)
            for token, source in zip(token_ids, new_sources, strict=True)
        ]

    def _piece(self, token_id: int) -> str:
        """The text that a token completes: empty while a character is half done."""
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._shown])
        after = self._tokenizer.decode(self._window)
        if len(after) <= len(before) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._window = self._window[-CONTEXT:]
        self._shown = len(self._window)
        return after[len(before) :]
