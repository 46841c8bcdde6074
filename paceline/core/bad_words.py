"""Words that must not be completed, found from the end of the output: the cost does not grow with their number.

>>> words = BadWords([(4,), (7, 8, 9), (8, 3)])
>>> [ids.tolist() for ids in words.endings([1, 7, 8])]  # (4,) always, (8, 3) and (7, 8, 9) after 7, 8
[[4], [3], [9]]
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_NONE: Ids = np.zeros(0, dtype=np.int64)


class _Node:
    """What may not follow an output that ends with the tokens on the way to here, read backwards."""

    __slots__ = ("banned", "before")

    def __init__(self) -> None:
        self.banned = _NONE
        self.before: dict[int, _Node] = {}


class BadWords:
    def __init__(self, words: Iterable[Sequence[int]] = ()) -> None:
        self._root = _Node()
        endings: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *start, last in words:
            endings[tuple(start)].append(last)
        for start_ids, banned in endings.items():
            node = self._root
            for token in reversed(start_ids):
                node = node.before.setdefault(token, _Node())
            node.banned = np.array(banned, dtype=np.int64)  # a list would be converted at every row

    def __bool__(self) -> bool:
        return bool(len(self._root.banned) or self._root.before)

    @property
    def always_banned(self) -> frozenset[int]:
        """Words of one token."""
        return frozenset(self._root.banned.tolist())

    def endings(self, output_ids: Sequence[int]) -> Iterator[Ids]:
        """The last tokens of every word whose other tokens are what the output ends with, some at a time."""
        node: _Node | None = self._root
        index = len(output_ids)
        while node is not None:
            if len(node.banned):
                yield node.banned
            index -= 1
            node = node.before.get(output_ids[index]) if index >= 0 else None


NO_BAD_WORDS = BadWords()
