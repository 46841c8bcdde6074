"""Parsers: small machines that read a model's text character by character and put what they find into an `Out`.

>>> from paceline.serve.tools.events import Out
>>> [*parse(Hermes({"f"}, Out()), 'Wait.\\n<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>')]
[Content(text='Wait.'), CallBegin(index=0, name='f'), Arguments(index=0, text='{"x": 1}')]

What looks like a call and is none (no JSON, or a function that was not offered) is content, character for character.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from paceline.serve.tools.events import Event, Out
from paceline.serve.tools.json_call import SPACE, JsonCall
from paceline.serve.tools.marker import Marker


class Parser(Protocol):
    out: Out

    def add(self, char: str) -> None: ...

    def end(self, cut_off: bool) -> None: ...  # no text follows: what was held back is content


def feed(parser: Parser, text: str) -> list[Event]:
    """The events of the next piece of the text."""
    for char in text:
        parser.add(char)
    return parser.out.take()


def finish(parser: Parser, cut_off: bool = False) -> list[Event]:
    """`cut_off`: the text ended at its limit. Then the beginning of a call that has no name yet is not told."""
    parser.end(cut_off)
    parser.out.end()
    return parser.out.take()


def parse(parser: Parser, text: str) -> list[Event]:
    """A whole text at once."""
    return [*feed(parser, text), *finish(parser)]


class CallInText:
    """One JSON call on its way into an `Out`; `before` is what stood before it, in case it is none."""

    def __init__(self, names: Collection[str], out: Out, before: str) -> None:
        self._call = JsonCall(names)
        self._out = out
        self._before = before
        self._told = False

    def add(self, char: str) -> bool | None:
        """True: it ended; False: it is none, its text was given back and `char` is to be read again; None: go on."""
        arguments = self._call.add(char)
        if self._call.failed:
            self._out.content(self._before + self._call.raw[:-1])
            return False
        if self._call.name is not None and not self._told:
            self._told = True
            self._out.begin(self._call.name)
        if arguments:
            self._out.arguments(arguments)
        return True if self._call.done else None

    def end(self, cut_off: bool) -> None:
        """The text ended within it."""
        if not self._told and not cut_off:
            self._out.content(self._before + self._call.raw)


class AfterMarker(ABC):
    """A family whose calls come after a marker, with text before it."""

    BEGIN: ClassVar[str]

    def __init__(self, names: Collection[str], out: Out) -> None:
        self.out = out
        self._names = names
        self._begin = Marker(self.BEGIN)
        self._call: CallInText | None = None
        self._step: Callable[[str], None] = self._in_text

    @abstractmethod
    def _found(self) -> None: ...  # the marker: what the next character is for

    @abstractmethod
    def _called(self) -> None: ...  # a call has ended

    def add(self, char: str) -> None:
        self._step(char)

    def end(self, cut_off: bool) -> None:
        if self._step == self._in_text:
            self.out.content(self._begin.rest(cut_off))
        elif self._call is not None:
            self._call.end(cut_off)

    def _in_text(self, char: str) -> None:
        self.out.content(self._begin.add(char))
        if self._begin.found:
            self._begin.clear()
            self._found()

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        ended = self._call.add(char)
        if ended is None:
            return
        self._call = None
        if ended:
            self._called()
        else:  # it was none
            self._step = self._in_text
            self._in_text(char)


class Hermes(AfterMarker):
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text around them."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str], out: Out) -> None:
        super().__init__(names, out)
        self._finish = Marker(self.END)

    def _found(self) -> None:
        self._call = CallInText(self._names, self.out, self.BEGIN)
        self._step = self._in_call

    def _called(self) -> None:
        self._step = self._to_the_end

    def _to_the_end(self, char: str) -> None:
        self._finish.add(char)
        if self._finish.found:
            self._finish.clear()
            self._step = self._in_text


class Llama3Json:
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several with `;` between them."""

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str], out: Out) -> None:
        self.out = out
        self._names = names
        self._before = ""  # white space and the tag
        self._call: CallInText | None = None
        self._is_text = False

    def add(self, char: str) -> None:
        if self._is_text:
            self.out.content(char)
        elif self._call is not None:
            self._in_call(char)
        elif char == "{":
            self._call = CallInText(self._names, self.out, self._before)
            self._before = ""
            self._in_call(char)
        elif self._may_precede(self._before + char):
            self._before += char
        else:
            self._to_text(self._before + char)

    def end(self, cut_off: bool) -> None:
        if self._call is not None:
            self._call.end(cut_off)
        elif not self._is_text and not self.out.num_calls:
            self.out.content(self._before)

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        ended = self._call.add(char)
        if ended is not None:
            self._call = None
            if not ended:
                self._to_text(char)

    def _may_precede(self, text: str) -> bool:
        if self.out.num_calls and not text.strip(SPACE + ";"):
            return True
        return self.TAG.startswith(text.strip(SPACE)) or text.strip(SPACE) == self.TAG

    def _to_text(self, text: str) -> None:
        self._is_text = True
        self._before = ""
        self.out.content(text)
