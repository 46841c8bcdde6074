"""The text of a growing list of tokens, piece by piece, at a cost per token that the text's length does not set.

A byte-level token may end in the middle of a character, so a token's text comes with the token that completes it. Only
a window of the newest tokens is decoded. Appending token by token makes the text independent of how tokens are grouped.

>>> class Bytes:
...     def decode(self, token_ids, skip_special_tokens=True):
...         return bytes(token_ids).decode(errors="replace")
>>> text = IncrementalText(Bytes())
>>> [text.append(token) for token in "aé".encode()]
['a', '', 'é']
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from paceline.core.tokenizer import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how the bytes of half a character are decoded
CONTEXT = 6  # tokens that stand before the text, kept so that its first token is decoded as a continuation
# Tokens without text after which the oldest of them are settled. A choice: at least twice a character's tokens, so that
# texts never get here; at twice of it a run of such tokens (special ones, bytes of no character) costs twice as much.
MAX_PENDING = 32
MAX_CHARACTER_TOKENS = 4  # UTF-8: a character has at most four bytes
# A window is mostly the last token, or the two last. Their texts are kept for each tokenizer: asking it takes most of
# the time of a token.
MAX_KNOWN = 2
MAX_TEXTS = 1 << 16
_KNOWN: WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], str]] = WeakKeyDictionary()


class IncrementalText:
    def __init__(
        self, tokenizer: Tokenizer, context_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._known = _KNOWN.setdefault(tokenizer, {})
        self._skip_special_tokens = skip_special_tokens
        # [_prefix, _read) has become text and is kept as context: a tokenizer may drop a leading space.
        # [_read, end) is pending.
        self._token_ids = list(context_token_ids[-CONTEXT:])
        self._prefix = 0
        self._read = len(self._token_ids)

    def append(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is half done."""
        self._token_ids.append(token_id)
        end = len(self._token_ids)
        before = self._decode(self._prefix, self._read)
        after = self._decode(self._prefix, end)
        if len(after) > len(before) and not after.endswith(INCOMPLETE):
            return self._release(before, after, end)
        return self._settle(before, after) if end - self._read > MAX_PENDING else ""

    def finish(self) -> str:
        """What is pending, as it stands: half a character is the replacement character."""
        end = len(self._token_ids)
        return self._release(self._decode(self._prefix, self._read), self._decode(self._prefix, end), end)

    def _release(self, before: str, after: str, end: int) -> str:
        self._prefix, self._read = self._read, end
        return after[len(before) :]

    def _settle(self, before: str, after: str) -> str:
        """Release the oldest pending tokens, up to where no character can be in two parts.

        That is a place whose two sides decode to what the whole decodes to. Enough tokens follow each place tried to
        end a character that crosses it, and such a character crosses fewer places than are tried. (Only half a
        character before a long run of special tokens is not waited for any more.)"""
        end = len(self._token_ids)
        for place in range(end - MAX_CHARACTER_TOKENS, end - 2 * MAX_CHARACTER_TOKENS, -1):
            settled = self._decode(self._prefix, place)
            if settled + self._decode(place, end) != after:
                continue
            if settled != before:
                return self._release(before, settled, place)
            del self._token_ids[self._read : place]  # they have no text: the context stays what it is
            return ""
        return ""

    def _decode(self, start: int, end: int) -> str:
        token_ids = self._token_ids[start:end]
        if end - start > MAX_KNOWN:
            return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        key = (self._skip_special_tokens, *token_ids)
        text = self._known.get(key)
        if text is None:
            if len(self._known) >= MAX_TEXTS:
                self._known.clear()
            text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
            self._known[key] = text
        return text
