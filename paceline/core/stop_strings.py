"""Which stop string ends a text, for any number of stop strings: an Aho-Corasick automaton.

A state is the longest end of the text that some stop string begins with. Each new character leads to the next state, at
a cost that does not grow with the number of strings; built once for a call, read by all its samples.

>>> stops = StopStrings(["abc", "b"])
>>> state, found = stops.read(0, "xa", start=0)
>>> found, stops.held_back(state)
(None, 1)
>>> stops.read(state, "bc", start=2)[1]  # the text is now "xabc", and "abc" begins before "b" does
(1, 'abc')
"""

from collections.abc import Sequence

import numpy as np

_CODES = 0x110000  # one past the largest character


class StopStrings:
    """States are numbers; 0 is the beginning. Each state stands for one prefix of some stop strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._next: dict[int, int] = {}  # state * _CODES + character -> state
        self._depth = [0]  # characters of the state's prefix
        self._shorter = [0]  # the state of the longest proper end of the prefix that is a prefix too
        self._found = [-1]  # the longest stop string that the prefix ends with, as its first index; -1: none
        self._held = [0]  # the longest end of the prefix that may still become a stop string
        self._build()

    def __bool__(self) -> bool:
        return bool(self._strings)

    def held_back(self, state: int) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._held[state]

    def read(self, state: int, text: str, start: int) -> tuple[int, tuple[int, str] | None]:
        """Go on from `state` with `text`, which stands at `start`: the new state, and the stop string that ends in it.

        That one is (where it begins, itself): of several the one that begins first, of those that begin together the
        first in the list."""
        best: tuple[int, int] | None = None
        for i, code in enumerate(map(ord, text)):
            state = self._step(state, code)
            if state and self._found[state] >= 0:
                # The longest one that ends here also begins first here.
                index = self._found[state]
                found = (start + i + 1 - len(self._strings[index]), index)
                best = found if best is None else min(best, found)
        return state, None if best is None else (best[0], self._strings[best[1]])

    def _step(self, state: int, code: int) -> int:
        following = self._next.get(state * _CODES + code)
        while following is None and state:
            state = self._shorter[state]
            following = self._next.get(state * _CODES + code)
        return following or 0

    def _build(self) -> None:
        parents, codes = [0], [0]
        for index, string in enumerate(self._strings):
            state = 0
            for code in map(ord, string):
                following = self._next.get(state * _CODES + code)
                if following is None:
                    following = self._next[state * _CODES + code] = len(parents)
                    parents.append(state)
                    codes.append(code)
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(-1)
                state = following
            if self._found[state] < 0:
                self._found[state] = index
        has_longer = np.zeros(len(parents), dtype=bool)
        has_longer[parents[1:]] = True
        self._shorter = [0] * len(parents)
        self._held = [0] * len(parents)
        # By depth: what a state's links lead to is always shallower, so it is complete by then.
        for state in np.argsort(self._depth, kind="stable")[1:].tolist():
            parent = parents[state]
            shorter = self._step(self._shorter[parent], codes[state]) if parent else 0
            self._shorter[state] = shorter
            if self._found[state] < 0:
                self._found[state] = self._found[shorter]
            self._held[state] = self._depth[state] if has_longer[state] else self._held[shorter]


NO_STOP_STRINGS = StopStrings(())
