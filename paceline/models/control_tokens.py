"""Control tokens belong to the chat template: in a message, `<|im_end|>` is nine characters of text.

Were it the token, the author of a message could end the turn and write another role's text. A rendered chat no longer
shows what came from a message, so the spellings inside messages are marked before the template is rendered. What is
left unmarked afterwards is the template's own.

The marked chat is encoded by a copy of the tokenizer (`Twin`) that knows control tokens under names that cannot be
guessed. The marks are taken out, and the messages' text is plain text to that copy.

Chats in which no message spells a control token (nearly all) never come here.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

PRIVATE_USE = range(0xE000, 0xF8FF)  # characters that mean nothing; one that the messages do not use is the mark


class Twin(NamedTuple):
    """The tokenizer with its control tokens renamed."""

    backend: tokenizers.Tokenizer
    names: dict[str, str]  # of control tokens, by their spelling
    real_ids: dict[int, int]  # the twin's ids of control tokens -> the tokenizer's


class ControlTokens:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items() if token.special and token.content}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._twin: Twin | None = None

    def found_in(self, messages: Sequence[Any]) -> bool:
        pattern = self._pattern
        return pattern is not None and any(pattern.search(text) for text in _texts(messages))

    def mark(self, messages: Sequence[Any]) -> tuple[Any, str]:
        """The messages with every control token's spelling interrupted by a mark, and that mark."""
        used = set().union(*_texts(messages))
        mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in used)
        return self._marked(messages, mark), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """A rendered chat: control tokens where they stand unmarked, text everywhere else."""
        backend, names, real_ids = self.make_ready()
        assert self._pattern is not None
        named = self._pattern.sub(lambda found: names[found[0]], text).replace(mark, "")
        return [real_ids.get(token, token) for token in backend.encode(named, add_special_tokens=False).ids]

    def make_ready(self) -> "Twin":
        """Make the twin now: it takes a good part of a second, in which a server would answer no request."""
        if self._twin is None:
            self._twin = self._make_twin()
        return self._twin

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._pattern is not None
            return self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value

    def _make_twin(self) -> "Twin":
        secret = secrets.token_hex(8)
        names = {content: f"<{secret}:{content}>" for content in self._ids}
        state = json.loads(self._backend.to_str())
        for entry in state["added_tokens"]:
            entry["content"] = names.get(entry["content"], entry["content"])
        state["post_processor"] = None  # adds nothing here, and may name tokens that are renamed
        twin = tokenizers.Tokenizer.from_str(json.dumps(state))
        twin_ids = {content: twin.token_to_id(name) for content, name in names.items()}
        return Twin(twin, names, {own: self._ids[content] for content, own in twin_ids.items() if own is not None})


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value, *value.values()]  # of a tool's schema, the keys are the client's too
    items = value if isinstance(value, list | tuple) else ()
    return [text for item in items for text in _texts(item)]
