"""Where the last n tokens of a growing text stood before, found in constant time.

For every n in [min_n, max_n] a dictionary holds the newest place where each n-gram ended, and a list links each place
to the one before it, as in LZ77. Appending a token costs one insertion per n and a lookup costs one per n, however long
the text is. The n-grams that end at the last token are looked up but not yet inserted: they would only find themselves.
"""

from collections.abc import Iterator, Sequence
from typing import Any


class NgramIndex:
    def __init__(self, min_n: int, max_n: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)  # longest first
        self.num_indexed = 0  # n-grams that end in [0, num_indexed) are in
        self._newest: dict[int, dict[Any, int]] = {n: {} for n in self.sizes}  # n -> n-gram -> where it ended
        self._older: dict[int, list[int]] = {n: [] for n in self.sizes}  # n -> end -> earlier end, or -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what was appended to `tokens` since the last call, all but the last token."""
        end = len(tokens) - 1
        if end <= self.num_indexed:
            return
        for n in self.sizes:
            newest, older = self._newest[n], self._older[n]
            for i in range(self.num_indexed, end):
                if i + 1 < n:
                    older.append(-1)
                    continue
                key = tokens[i] if n == 1 else tuple(tokens[i - n + 1 : i + 1])
                older.append(newest.get(key, -1))
                newest[key] = i
        self.num_indexed = end

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(n, start): the last n tokens also stand right before `start`. Longest n first, then newest first.

        A place is given once, under the longest n that matches there."""
        seen: set[int] = set()
        for n in self.sizes:
            if len(tokens) <= n:
                continue
            key = tokens[-1] if n == 1 else tuple(tokens[-n:])
            end = self._newest[n].get(key, -1)
            while end >= 0:
                if end not in seen:
                    seen.add(end)
                    yield n, end + 1
                end = self._older[n][end]


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end it goes on with what it has copied, so a loop goes on."""
    copied = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied
