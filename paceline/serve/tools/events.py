"""What a parser finds in a model's text, as a client is to be told it: content, calls, and pieces of their arguments.

Events do not depend on how the text was cut into pieces, once neighbours of a kind are joined (`Out` joins those of
one piece). White space beside a call belongs to the call's notation and is not told: so it waits for what follows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # of the call within the answer
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    index: int
    text: str  # the next part of the call's arguments, which are JSON


Event = Content | CallBegin | Arguments


class Out:
    """Where a parser puts what it finds. `max_calls`: more of them are left out."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._parts: list[str] = []  # of the content or the arguments that the next event will hold
        self._is_content = True
        self._space = ""  # white space that nothing followed yet

    def content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._add(True, self._space + kept)
            self._space = ""
        self._space += text[len(kept) :]

    def begin(self, name: str) -> None:
        self._close()
        self._space = ""
        self.num_calls += 1
        if not self._left_out:
            self._events.append(CallBegin(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        if not self._left_out:
            self._add(False, text)

    def end(self) -> None:
        """No text follows. Beside calls, white space is theirs."""
        if self._space and not self.num_calls:
            self._add(True, self._space)
        self._space = ""

    def take(self) -> list[Event]:
        """The events since this was last asked."""
        self._close()
        events, self._events = self._events, []
        return events

    @property
    def _left_out(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _add(self, is_content: bool, text: str) -> None:
        if is_content != self._is_content:
            self._close()
            self._is_content = is_content
        self._parts.append(text)

    def _close(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if text:
            self._events.append(Content(text) if self._is_content else Arguments(self.num_calls - 1, text))


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of a kind as one: what a text means, however it came."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            found[-1] = Arguments(last.index, last.text + event.text)
        else:
            found.append(event)
    return found
