"""Where the last n tokens stood before in a growing text, found in constant time.

For every n asked for, a dictionary holds the newest place where each n-gram ended, and a list links each place to the
one before it, as in LZ77. Appending a token costs one insertion per n and a lookup costs one per n, however long the
text is; memory is one link per token and n.
"""

from collections.abc import Iterator, Sequence
from typing import Any


class NgramIndex:
    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sorted(sizes, reverse=True)  # longest first
        self.end = 0  # places [0, end) are indexed
        # For every n: n-gram -> where it last ended; place -> the earlier place with the same n-gram, or -1
        self._tables: list[tuple[int, dict[Any, int], list[int]]] = [(n, {}, []) for n in self.sizes]

    def extend(self, text: Sequence[int], end: int) -> None:
        """Index the n-grams of `text` that end in [self.end, end)."""
        if end <= self.end:
            return
        longest = self.sizes[0]
        for place in range(self.end, end):
            window = tuple(text[max(0, place - longest + 1) : place + 1])
            for n, newest, older in self._tables:
                if place + 1 < n:
                    older.append(-1)
                    continue
                key = window[-1] if n == 1 else window[-n:]
                older.append(newest.get(key, -1))
                newest[key] = place
        self.end = end

    def matches(self, suffix: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(n, start): the last n tokens of `suffix` stand right before `start` in the indexed text.

        Longest n first, then newest first. A place is given once, under the longest n that matches there."""
        seen: set[int] = set()
        for n, newest, older in self._tables:
            if len(suffix) < n:
                continue
            place = newest.get(suffix[-1] if n == 1 else tuple(suffix[-n:]), -1)
            while place >= 0:
                if place not in seen:
                    seen.add(place)
                    yield n, place + 1
                place = older[place]


def copy_from(text: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end it goes on with what it has copied, so a loop goes on."""
    copied = list(text[start : start + count])
    period = len(text) - start
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied
