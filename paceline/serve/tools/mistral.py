"""The parser of Mistral's calls, in their older and their newer notation."""

from collections.abc import Collection

from paceline.serve.tools.events import Out
from paceline.serve.tools.json_call import SPACE, JsonValue
from paceline.serve.tools.parsers import AfterMarker, CallInText


class Mistral(AfterMarker):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or (newer) `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    BEGIN, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, names: Collection[str], out: Out) -> None:
        super().__init__(names, out)
        self._raw = ""  # since the marker, until it is a call
        self._value: JsonValue | None = None

    def end(self, cut_off: bool) -> None:
        super().end(cut_off)
        is_open = self._step != self._in_text and self._call is None
        if is_open and not cut_off and self._raw.startswith(self.BEGIN):  # nothing of it was a call yet
            self.out.content(self._raw)

    def _found(self) -> None:
        self._raw = self.BEGIN
        self._step = self._after_marker

    def _called(self) -> None:
        pass  # the list goes on

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
