"""Requests to workers: one index of who holds which prefix, one account of who has what to do, one lock around both.

`route` chooses a worker and reserves its place there in one step, so that two requests that come together do not both
see the same idle worker. The reservation is told when the first token came and when the request ended; closing it twice
does no harm. While one worker of a role lives, `route` cannot fail; when none does it raises `NoWorkerError`.

    reservation = router.route(keys, num_prompt_tokens)
    ...                                  # send it to reservation.worker_id
    reservation.first_token()
    reservation.close()
"""

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.cluster.choosers import Chooser
from paceline.cluster.index import PrefixIndex
from paceline.cluster.loads import Candidates, Loads
from paceline.cluster.policy import WorkerLoad
from paceline.errors import PacelineError


class NoWorkerError(PacelineError, RuntimeError):
    """No worker of a role lives: wait for one to join, or start one."""


@dataclass(slots=True)
class Reservation:
    """One request's place on one worker."""

    worker_id: str
    num_cached_blocks: int  # of its prompt, by the index: a hint
    slot: int
    num_new_tokens: int  # to be computed here
    num_uncached_tokens: int  # to be computed here or elsewhere
    num_blocks: int
    join: int  # which joining of a worker it belongs to
    _router: "Router"
    _has_first_token: bool = field(default=False, init=False)
    _is_closed: bool = field(default=False, init=False)

    def compute_elsewhere(self, num_left: int) -> None:
        """A prefill worker takes its prompt: only so many tokens are left to compute here."""
        self._router._shrink(self, num_left)

    def first_token(self) -> None:
        self._router._began(self)

    def close(self) -> None:
        self._router._ended(self)


class Router:
    """Workers of one role. A cluster that computes prompts apart has two routers."""

    def __init__(self, chooser: Chooser, block_size: int, seed: int | None = None) -> None:
        self.block_size = block_size
        self._chooser = chooser
        self._index = PrefixIndex()
        self._loads = Loads()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}  # worker id -> slot, of those that live
        self._ids: dict[int, str] = {}
        self._joins: dict[int, int] = {}  # slot -> number of its worker's joining, which is never used again
        self._num_joins = 0

    @property
    def worker_ids(self) -> list[str]:
        with self._lock:
            return list(self._slots)

    def add(self, worker_id: str) -> None:
        with self._lock:
            assert worker_id not in self._slots, f"worker {worker_id} joined twice"
            slot = self._loads.open()
            self._num_joins += 1
            self._slots[worker_id], self._ids[slot], self._joins[slot] = slot, worker_id, self._num_joins

    def remove(self, worker_id: str) -> None:
        """It died or leaves: nothing goes to it any more, and its blocks are forgotten."""
        with self._lock:
            slot = self._slots.pop(worker_id, None)
            if slot is not None:
                del self._ids[slot], self._joins[slot]
                self._loads.close(slot)
                self._index.cleared(slot)

    def stored(self, worker_id: str, keys: Iterable[int]) -> None:
        with self._lock:
            if (slot := self._slots.get(worker_id)) is not None:
                self._index.stored(slot, keys)

    def removed(self, worker_id: str, keys: Iterable[int]) -> None:
        with self._lock:
            if (slot := self._slots.get(worker_id)) is not None:
                self._index.removed(slot, keys)

    def cleared(self, worker_id: str) -> None:
        with self._lock:
            if (slot := self._slots.get(worker_id)) is not None:
                self._index.cleared(slot)

    def route(self, keys: Sequence[int], num_prompt_tokens: int, avoid: Iterable[str] = ()) -> Reservation:
        """Choose and reserve. `avoid`: workers that just failed this request, used only where there is no other."""
        with self._lock:
            slots = self._candidates(avoid)
            found = self._index.overlaps(keys)
            cached = np.array([found.get(slot, 0) for slot in slots.tolist()], np.int64)
            loads = self._loads
            candidates = Candidates(
                slots=slots,
                num_queued=loads.num_queued[slots],
                queued_tokens=loads.queued_tokens[slots],
                num_running=loads.num_running[slots],
                active_blocks=loads.active_blocks[slots],
                cached_blocks=cached,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self.block_size,
            )
            position = self._chooser.choose(candidates, self._dice)
            return self._reserve(int(slots[position]), int(cached[position]), num_prompt_tokens)

    def _candidates(self, avoid: Iterable[str]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        slots = self._loads.slots()
        if not slots.size:
            raise NoWorkerError(
                "no worker is alive: start one with `paceline cluster up`, or wait for one to come back"
            )
        avoided = {self._slots[worker_id] for worker_id in avoid if worker_id in self._slots}
        others = slots[~np.isin(slots, list(avoided))] if avoided else slots
        return others if others.size else slots

    def _reserve(self, slot: int, num_cached: int, num_prompt_tokens: int) -> Reservation:
        new = num_prompt_tokens - min(num_cached * self.block_size, num_prompt_tokens - 1)
        num_blocks = -(-num_prompt_tokens // self.block_size)
        self._loads.num_queued[slot] += 1
        self._loads.queued_tokens[slot] += new
        self._loads.active_blocks[slot] += num_blocks
        return Reservation(self._ids[slot], num_cached, slot, new, new, num_blocks, self._joins[slot], self)

    def _shrink(self, reservation: Reservation, num_tokens: int) -> None:
        with self._lock:
            less = reservation.num_new_tokens - num_tokens
            reservation.num_new_tokens = num_tokens
            if not reservation._is_closed and not reservation._has_first_token and self._still_there(reservation):
                self._loads.queued_tokens[reservation.slot] -= less

    def _began(self, reservation: Reservation) -> None:
        with self._lock:
            if reservation._is_closed or reservation._has_first_token:
                return
            reservation._has_first_token = True
            if self._still_there(reservation):
                self._loads.num_queued[reservation.slot] -= 1
                self._loads.queued_tokens[reservation.slot] -= reservation.num_new_tokens
                self._loads.num_running[reservation.slot] += 1

    def _ended(self, reservation: Reservation) -> None:
        with self._lock:
            if reservation._is_closed:
                return
            reservation._is_closed = True
            if not self._still_there(reservation):
                return
            slot = reservation.slot
            self._loads.active_blocks[slot] -= reservation.num_blocks
            if reservation._has_first_token:
                self._loads.num_running[slot] -= 1
            else:
                self._loads.num_queued[slot] -= 1
                self._loads.queued_tokens[slot] -= reservation.num_new_tokens

    def _still_there(self, reservation: Reservation) -> bool:
        """False when its worker is gone; the slot, or even the name, may belong to another one by now."""
        return self._joins.get(reservation.slot) == reservation.join

    def load(self, worker_id: str) -> WorkerLoad:
        with self._lock:
            slot = self._slots.get(worker_id)
            return WorkerLoad() if slot is None else self._loads.of(slot)

    def holders(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of a prompt's leading blocks who holds, by the index."""
        with self._lock:
            return {self._ids[slot]: count for slot, count in self._index.overlaps(keys).items()}

    def num_held(self, worker_id: str) -> int:
        """Blocks that it holds, by the index."""
        with self._lock:
            slot = self._slots.get(worker_id)
            return 0 if slot is None else self._index.num_held(slot)

    def check_integrity(self) -> None:
        with self._lock:
            self._index.check_integrity()
            slots = self._loads.slots()
            assert set(slots.tolist()) == set(self._ids) == set(self._slots.values()), "workers and slots differ"
            for counts in (self._loads.num_queued, self._loads.queued_tokens, self._loads.num_running):
                assert (counts[slots] >= 0).all(), "a reservation was given back twice"
