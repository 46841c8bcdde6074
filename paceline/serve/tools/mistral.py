"""The parser of Mistral's calls, in their older and their newer notation."""

from collections.abc import Callable, Collection

from paceline.serve.tools.events import Out
from paceline.serve.tools.json_call import SPACE, JsonValue
from paceline.serve.tools.marker import Marker
from paceline.serve.tools.parsers import CallInText


class Mistral:
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or (newer) `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    BEGIN, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, names: Collection[str], out: Out) -> None:
        self.out = out
        self._names = names
        self._begin = Marker(self.BEGIN)
        self._raw = ""  # since the marker, until it is a call
        self._call: CallInText | None = None
        self._value: JsonValue | None = None
        self._step: Callable[[str], None] = self._in_text

    def add(self, char: str) -> None:
        self._step(char)

    def end(self, cut_off: bool) -> None:
        if self._step == self._in_text:
            self.out.content(self._begin.rest(cut_off))
        elif self._call is not None:
            self._call.end(cut_off)
        elif not cut_off and self._raw.startswith(self.BEGIN):  # nothing of it was a call yet
            self.out.content(self._raw)

    def _in_text(self, char: str) -> None:
        self.out.content(self._begin.add(char))
        if self._begin.found:
            self._begin.clear()
            self._raw = self.BEGIN
            self._step = self._after_marker

    def _after_marker(self, char: str) -> None:
        self._raw += char
        if char == "[":
            self._step = self._in_list
        elif char not in SPACE:
            self._step = self._in_name
            self._raw = self._raw[:-1]
            self._in_name(char)

    def _in_list(self, char: str) -> None:
        if self._call is not None:
            self._in_call(char)
        elif char == "{":
            self._call = CallInText(self._names, self.out, self._raw)
            self._raw = ""
            self._in_call(char)
        elif char == "]":
            self._raw = ""
            self._step = self._in_text
        elif char not in SPACE + ",":
            self._give_up(self._raw + char)
        else:
            self._raw += char

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        ended = self._call.add(char)
        if ended is not None:
            self._call = None
            if not ended:
                self._step = self._in_text
                self._in_text(char)

    def _in_name(self, char: str) -> None:
        if char != "{":
            self._raw += char
            if not self._may_be_name(self._raw.removeprefix(self.BEGIN).strip(SPACE)):
                self._give_up(self._raw)
            return
        name = self._raw.removeprefix(self.BEGIN).strip(SPACE).removesuffix(self.ARGS)
        if name not in self._names:
            self._give_up(self._raw + char)
            return
        self._raw = ""
        self.out.begin(name)
        self._value = JsonValue()
        self._step = self._in_arguments
        self._in_arguments(char)

    def _may_be_name(self, text: str) -> bool:
        return any((name + self.ARGS).startswith(text) for name in self._names)

    def _in_arguments(self, char: str) -> None:
        assert self._value is not None
        self._value.add(char)
        self.out.arguments(char)
        if self._value.closed:
            self._value = None
            self._step = self._in_text

    def _give_up(self, text: str) -> None:
        self._raw = ""
        self._step = self._in_text
        self.out.content(text)
