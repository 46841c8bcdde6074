"""Finds a marker such as `<tool_call>` in text that comes in pieces: what may be its beginning is held back."""


class Marker:
    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.held = ""  # the end of the text, as far as the marker may begin with it

    def add(self, char: str) -> str:
        """The text that is surely not of the marker. Look at `found` next."""
        self.held += char
        begin = 0
        while not self.marker.startswith(self.held[begin:]):
            begin += 1
        passed, self.held = self.held[:begin], self.held[begin:]
        return passed

    @property
    def found(self) -> bool:
        return self.held == self.marker

    def rest(self, cut_off: bool) -> str:
        """What was held back, when no text follows. More than one character at a limit was to be the marker."""
        return "" if cut_off and len(self.held) > 1 else self.held

    def clear(self) -> None:
        self.held = ""
