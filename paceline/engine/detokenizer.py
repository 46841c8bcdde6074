"""The text of one request's output, and stop strings found on the way.

Text that a stop string may still take back waits; the rest is stable and kept as pieces, so that a reader takes the
newest ones at a cost that the length of the text does not set.
"""

from collections import deque
from collections.abc import Sequence

from paceline.core.incremental_text import IncrementalText
from paceline.core.stop_strings import NO_STOP_STRINGS, StopStrings
from paceline.core.tokenizer import Tokenizer


class Detokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: StopStrings = NO_STOP_STRINGS,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.pieces: list[str] = []  # the stable text: only ever extended
        self._waiting: deque[str] = deque()  # the text after it
        self._num_stable = 0  # characters of `pieces`
        self._num_waiting = 0  # characters of `_waiting`
        self._decoded = IncrementalText(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = stop
        self._stop_state = 0  # of what the text ends with
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def text(self) -> str:
        return self.stable_text + "".join(self._waiting)

    @property
    def stable_text(self) -> str:
        """What no stop string can still take back: safe to stream."""
        return "".join(self.pieces)

    def stable_length(self) -> int:
        return self._num_stable

    def append(self, token_id: int) -> str | None:
        """Take in one token; return the stop string that it completed, if any (the text then ends there)."""
        self._num_tokens += 1
        piece = self._decoded.append(token_id)
        return self._add(piece) if piece else None

    def finish(self) -> None:
        """No token follows: all of the text is stable."""
        try:
            self._wait(self._decoded.finish())
        finally:
            self._settle(0)

    def _add(self, piece: str) -> str | None:
        """Add to the text; the stop string that ends in the new piece, once min_tokens allows one."""
        start = self._num_stable + self._num_waiting
        self._wait(piece)
        found = None
        if self._stop:
            self._stop_state, found = self._stop.read(self._stop_state, piece, start)
        if found is None or self._num_tokens <= self._min_tokens:
            self._settle(self._stop.held_back(self._stop_state))
            return None
        at, stop = found
        # A stop string begins in the waiting text: what it began with was held back.
        waiting = "".join(self._waiting)[: (at + len(stop) if self._include_stop else at) - self._num_stable]
        self._waiting, self._num_waiting = deque([waiting]), len(waiting)
        self._settle(0)
        return stop

    def _wait(self, piece: str) -> None:
        self._waiting.append(piece)
        self._num_waiting += len(piece)

    def _settle(self, num_held: int) -> None:
        """All waiting text but the last `num_held` characters is stable from now on."""
        while self._waiting and self._num_waiting > num_held:
            piece = self._waiting.popleft()
            excess = self._num_waiting - num_held
            if excess < len(piece):
                self._waiting.appendleft(piece[excess:])
                piece = piece[:excess]
            self.pieces.append(piece)
            self._num_stable += len(piece)
            self._num_waiting -= len(piece)
