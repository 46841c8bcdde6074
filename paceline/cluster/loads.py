"""What the workers of one role have to do, one array entry per worker, and what of it a new prompt would meet."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.policy import WorkerLoad

Ints = NDArray[np.int64]


class Loads:
    """Grows as workers come. A slot whose worker is gone is not live and may be taken by a new one."""

    def __init__(self) -> None:
        self.live: NDArray[np.bool_] = np.zeros(8, np.bool_)
        self.queued_tokens: Ints = np.zeros(8, np.int64)
        self.num_queued: Ints = np.zeros(8, np.int64)
        self.num_running: Ints = np.zeros(8, np.int64)
        self.active_blocks: Ints = np.zeros(8, np.int64)  # of the requests that are reserved on it
        self._slots: Ints | None = None  # of live workers; None: to be found again

    def open(self) -> int:
        free = np.flatnonzero(~self.live)
        if free.size == 0:
            self._grow()
            free = np.flatnonzero(~self.live)
        slot = int(free[0])
        for array in (self.queued_tokens, self.num_queued, self.num_running, self.active_blocks):
            array[slot] = 0
        self.live[slot], self._slots = True, None
        return slot

    def close(self, slot: int) -> None:
        self.live[slot], self._slots = False, None

    def slots(self) -> Ints:
        """Of the workers that live."""
        if self._slots is None:
            self._slots = np.flatnonzero(self.live)
        return self._slots

    def of(self, slot: int) -> WorkerLoad:
        return WorkerLoad(int(self.num_queued[slot]), int(self.queued_tokens[slot]), int(self.num_running[slot]))

    def _grow(self) -> None:
        def twice(array: Ints) -> Ints:
            return np.concatenate([array, np.zeros_like(array)])

        self.live = np.concatenate([self.live, np.zeros_like(self.live)])
        self.queued_tokens, self.num_queued = twice(self.queued_tokens), twice(self.num_queued)
        self.num_running, self.active_blocks = twice(self.num_running), twice(self.active_blocks)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The workers that a prompt may go to. Arrays have one entry for each."""

    slots: Ints
    num_queued: Ints
    queued_tokens: Ints
    num_running: Ints
    active_blocks: Ints
    cached_blocks: Ints  # leading blocks of the prompt that each holds
    num_prompt_tokens: int
    block_size: int

    @property
    def num_prompt_blocks(self) -> int:
        return -(-self.num_prompt_tokens // self.block_size)

    @property
    def cached_tokens(self) -> Ints:
        """At most all but one: the last token is always computed."""
        return np.minimum(self.cached_blocks * self.block_size, self.num_prompt_tokens - 1)
