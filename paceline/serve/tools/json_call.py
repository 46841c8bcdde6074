"""One call as models write it, `{"name": "f", "arguments": {...}}`, read character by character.

It is a call once its name is one of those that were offered and its arguments begin (or the object ends without any).
Until then every character is kept, so that what turns out to be no call can be given back as text. From then on the
arguments pass through as the model wrote them.
"""

import json
from collections.abc import Collection
from typing import Final

SPACE: Final = " \t\r\n"
ARGUMENT_KEYS: Final = ("arguments", "parameters")
OTHER_KEYS: Final = ("type", "id")  # that some models write; an object with still others is an answer in JSON


class JsonValue:
    """Finds the end of one JSON value. Brackets and quotes are matched; what stands between is not judged."""

    def __init__(self) -> None:
        self.first = ""
        self._chars: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def add(self, char: str) -> bool:
        """Whether the value ended before `char`, which then is not part of it."""
        if self._ended():
            return True
        if self._in_string:
            self._string_char(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                return True
            self._depth -= 1
        elif self._depth == 0 and (char in SPACE or char == ","):
            return True
        self.first = self.first or char
        self._chars.append(char)
        return False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    @property
    def closed(self) -> bool:
        """It ended with its last character; a number only ends with what follows it."""
        return self._ended()

    def _ended(self) -> bool:
        return self._depth == 0 and not self._in_string and self.first != "" and self.first in '{["'

    def _string_char(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class JsonCall:
    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None  # once it is a call
        self.failed = False  # it is none
        self.done = False  # the object ended
        self._names = names
        self._found_name: str | None = None
        self._raw: list[str] = []  # everything read, until it is a call
        self._arguments: list[str] = []  # not told yet
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._step = self._open

    def add(self, char: str) -> str:
        """The arguments that may be told now; then look at `name`, `failed` and `done`."""
        if self.name is None:
            self._raw.append(char)
        self._step(char)
        if self.failed or self.name is None:
            return ""
        told = "".join(self._arguments)
        self._arguments.clear()
        return told

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def _open(self, char: str) -> None:
        if char == "{":
            self._step = self._before_key
        elif char not in SPACE:
            self._fail()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._value = JsonValue()
            self._value.add(char)
            self._step = self._in_key
        elif char == "}":
            self._end()
        elif char not in SPACE:
            self._fail()

    def _in_key(self, char: str) -> None:
        assert self._value is not None
        self._value.add(char)
        if self._value.closed:
            self._key = _decoded(self._value.text)
            self._step = self._before_colon
            if self._key != "name" and self._key not in ARGUMENT_KEYS and self._key not in OTHER_KEYS:
                self._fail()

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._value = JsonValue()
            self._step = self._in_value
        elif char not in SPACE:
            self._fail()

    def _in_value(self, char: str) -> None:
        assert self._value is not None
        if not self._value.first and char in SPACE:
            return
        if self._value.add(char):  # a number or a word ends before the character that follows
            self._take_value(self._value.text)
            self._after_value(char)
            return
        if self._key in ARGUMENT_KEYS and self._value.first == "{":  # told as they come
            self._arguments.append(char)
            self._decide()
        if self._value.closed:
            self._take_value(self._value.text)

    def _take_value(self, text: str) -> None:
        self._step = self._after_value
        if self._key == "name":
            self._found_name = _decoded(text)
            if self._found_name not in self._names:
                self._fail()
            elif self._arguments:
                self._decide()
        elif self._key in ARGUMENT_KEYS and text[:1] != "{":
            self._take_other_arguments(text)

    def _take_other_arguments(self, text: str) -> None:
        """Some models write the arguments as text that holds JSON, or null for none."""
        written = "{}" if text == "null" else _decoded(text)
        if written is None:
            self._fail()
            return
        self._arguments.append(written)
        self._decide()

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            self._end()
        elif char not in SPACE:
            self._fail()

    def _decide(self) -> None:
        if self.name is None and self._found_name is not None:
            self.name = self._found_name
            self._raw.clear()

    def _end(self) -> None:
        if self.name is None and self._found_name is not None:
            self._arguments = self._arguments or ["{}"]
            self._decide()
        self.failed = self.name is None
        self.done = True

    def _fail(self) -> None:
        """Before it is a call, it is none. Afterwards what was told stays, and the call ends here."""
        self.failed = self.name is None
        self.done = True


def _decoded(text: str) -> str | None:
    """The text that a JSON string stands for."""
    try:
        value = json.loads(text, strict=False)  # models write line breaks in strings
    except ValueError:
        return None
    return value if isinstance(value, str) else None
