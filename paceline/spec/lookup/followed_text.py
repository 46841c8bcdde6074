"""Following an output through the text that was expected of it.

An `Alignment` reads the output token by token and keeps a few *places* in the expected text from which it may go on,
likeliest first. As long as the first place predicts what comes, it is the only one. At a mismatch new places are
looked for: where the last tokens written stand in the expected text (longest match first, then nearest), and right
behind the token that was missed, as if it had been replaced.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.spec.lookup.ngram_index import NgramIndex

SIZES = (1, 2, 3, 4, 6, 8)  # n-grams of the output that are looked up in the expected text
MAX_PLACES = 8  # kept at a time
NEAR = 64  # a single token is looked for only this far from where the texts parted
MAX_REPLACED = 6  # tokens of a replacement worth remembering


@dataclass(frozen=True, slots=True)
class Place:
    at: int  # index in the expected text of the next token
    queue: tuple[int, ...] = ()  # rest of a replacement that is being made; `at` is behind what it replaces
    num_held: int = 0  # tokens it has predicted right
    replacing: tuple[int, ...] = ()  # the tokens of the expected text that the replacement under way stands for


class Alignment:
    def __init__(self, expected: list[int]) -> None:
        self._text = expected
        self._index = NgramIndex(SIZES)
        self._index.extend(expected, len(expected))
        self._output: list[int] = []
        self._replacements: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._parted: tuple[int, int] | None = None  # (expected, output) indices of the mismatch not yet explained
        self.places = [Place(0)]  # where it may go on, likeliest first

    def read(self, token: int) -> None:
        """One more token of the output."""
        surviving = []
        for place in self.places:
            step = self._next(place)
            if step is not None and step[0] == token:
                surviving.append(step[1])
        if not surviving:
            self._part(token)
            return
        self._output.append(token)
        best = max(surviving, key=lambda place: place.num_held)
        if self._parted is not None:
            self._explain(best)
        # Once a place has held for two tokens the others were chance.
        self.places = [best] if best.num_held >= 2 else surviving

    def expected(self, place: Place) -> Iterator[int]:
        """The tokens that come if the output goes on from `place`."""
        step = self._next(place)
        while step is not None:
            yield step[0]
            step = self._next(step[1])

    def _next(self, place: Place) -> tuple[int, Place] | None:
        """The token that `place` predicts and the place behind it; None at the end of the expected text."""
        queue, at, replacing = place.queue, place.at, place.replacing
        if not queue:
            replacing = ()
            for size in range(1, MAX_REPLACED + 1):
                replaced = tuple(self._text[at : at + size])
                if replaced in self._replacements and len(replaced) == size:
                    queue, at, replacing = self._replacements[replaced], at + size, replaced
                    break
        if queue:
            return queue[0], Place(at, queue[1:], place.num_held + 1, replacing)
        if at >= len(self._text):
            return None
        return self._text[at], Place(at + 1, (), place.num_held + 1)

    def _part(self, token: int) -> None:
        """Nothing predicted `token`: look for new places, and note where the texts parted."""
        best = self.places[0] if self.places else None
        self._output.append(token)
        if self._parted is None and best is not None:
            anchor = best.at - len(best.replacing) if best.queue else best.at
            self._parted = (anchor, len(self._output) - 1)
        for place in self.places:
            step = self._next(place)
            if step is not None:
                self._replacements.pop(step[1].replacing, None)  # it was wrong here, so it is not made again
        self.places = self._candidates()

    def _candidates(self) -> list[Place]:
        anchor, begin = self._parted if self._parted is not None else (0, 0)
        near = anchor + len(self._output) - begin  # where equally long texts would go on
        found: dict[int, int] = {}  # place -> length of the match that it comes from
        for n, start in self._index.matches(self._output[-SIZES[-1] :]):
            if n > 1 or abs(start - near) <= NEAR:
                found.setdefault(start, n)
        found.setdefault(near, 1)  # one token was replaced by one
        order = sorted(found, key=lambda at: (-min(found[at], 3), abs(at - near), at))
        return [Place(at) for at in order[:MAX_PLACES] if at < len(self._text)]

    def _explain(self, place: Place) -> None:
        """`place` held: what stood between the parting and here was replaced; remember it where it is short."""
        assert self._parted is not None
        if place.num_held < 2:
            return
        (old, new), self._parted = self._parted, None
        end_old, end_new = place.at, len(self._output)
        while end_old > old and end_new > new and self._text[end_old - 1] == self._output[end_new - 1]:
            end_old, end_new = end_old - 1, end_new - 1
        replaced, replacement = tuple(self._text[old:end_old]), tuple(self._output[new:end_new])
        if 0 < len(replaced) <= MAX_REPLACED and 0 < len(replacement) <= MAX_REPLACED:
            self._replacements[replaced] = replacement
