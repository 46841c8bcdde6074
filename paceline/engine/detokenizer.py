"""Tokens to text, one at a time, and stop strings found on the way.

Byte-level tokens may end in the middle of a character, so text is released only up to where it can no longer change.
Appending token by token, however many a step emitted, makes the text independent of how the tokens were grouped.
"""

from collections.abc import Sequence

from paceline.core.stop_strings import NO_STOP_STRINGS, StopStrings
from paceline.core.tokenizer import Tokenizer


class Detokenizer:
    """The text of one request's output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: StopStrings = NO_STOP_STRINGS,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._stop_state = 0  # of what the text ends with
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # [_prefix, _read) is text already released, kept as context: a tokenizer may drop a leading space.
        self._token_ids = list(prompt_token_ids[-_CONTEXT:])
        self._prefix = 0
        self._read = len(self._token_ids)

    def append(self, token_id: int) -> str | None:
        """Take in one token; return the stop string that it completed, if any (the text then ends there)."""
        self._token_ids.append(token_id)
        self._num_tokens += 1
        before = self._decode(self._prefix, self._read)
        after = self._decode(self._prefix, len(self._token_ids))
        if len(after) <= len(before) or after.endswith("�"):
            return None
        self._prefix, self._read = self._read, len(self._token_ids)
        return self._release(after[len(before) :])

    def finish(self) -> None:
        """Release what was held back: an unfinished character shows as the replacement sign."""
        before = self._decode(self._prefix, self._read)
        self.text += self._decode(self._prefix, len(self._token_ids))[len(before) :]
        self._prefix = self._read = len(self._token_ids)

    def stable_length(self) -> int:
        """Characters that no stop string can still take back: safe to stream."""
        return len(self.text) - self._stop.held_back(self._stop_state)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=self._skip_special_tokens)

    def _release(self, piece: str) -> str | None:
        """Add to the text; the stop string that ends in the new piece, once min_tokens allows one."""
        start = len(self.text)
        self.text += piece
        if not self._stop:
            return None
        self._stop_state, found = self._stop.read(self._stop_state, piece, start)
        if found is None or self._num_tokens <= self._min_tokens:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self._stop_state = 0  # the text ends here
        return stop


_CONTEXT = 6  # prompt tokens kept so that the first output token is decoded as a continuation
