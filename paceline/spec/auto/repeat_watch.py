"""Does a text begin to repeat itself? The cheapest test there is, for requests that are skipped.

Every three tokens in a row are remembered. Where the newest three occurred before, twice in a row, the text repeats an
earlier part: there is a place to copy from, and looking for it may pay.
"""

from collections.abc import Sequence

SPAN = 3  # tokens in a row
LEAST_STREAK = 2  # times in a row that they occurred before


class RepeatWatch:
    __slots__ = ("_end", "_seen", "_streak")

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()
        self._end = SPAN  # spans that end before here are known
        self._streak = 0

    def repeats(self, token_ids: Sequence[int]) -> bool:
        """`token_ids`: what was given before, and more."""
        seen, streak = self._seen, self._streak
        for end in range(self._end, len(token_ids) + 1):
            span = tuple(token_ids[end - SPAN : end])
            if span in seen:
                streak += 1
            else:
                streak = 0
                seen.add(span)
        self._end, self._streak = max(self._end, len(token_ids) + 1), streak
        return streak >= LEAST_STREAK
