"""Where a request goes: the decode worker that will run it, and by the policy a prefill worker for its prompt."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cluster.link import WorkerLink
from paceline.cluster.policy import Policy, Situation
from paceline.cluster.router import NoWorkerError, Reservation, Router

NUM_REMEMBERED = 64


@dataclass(slots=True)
class Placed:
    """Where a request went and why: for the live page."""

    request_id: str
    worker_id: str
    attempt: int
    num_cached_blocks: int
    prefill_worker_id: str | None
    reason: str
    keys: Sequence[int] = ()  # of its prompt's blocks
    num_fetched_blocks: int | None = None  # that its worker had after the transfer; None: there was none
    at_s: float = field(default_factory=time.time)


class Placer:
    def __init__(self, decode: Router, prefill: Router, policy: Policy, timeout_s: float) -> None:
        self.decode, self.prefill = decode, prefill
        self.timeout_s = timeout_s  # how long a request waits for a decode worker to come back
        self.placed: deque[Placed] = deque(maxlen=NUM_REMEMBERED)  # newest last
        self._policy = policy
        self._joined = asyncio.Event()

    def router_of(self, link: WorkerLink) -> Router:
        return self.prefill if link.hello["role"] == "prefill" else self.decode

    def note_joined(self) -> None:
        """Requests that wait for a worker look again."""
        self._joined.set()
        self._joined = asyncio.Event()

    async def route(self, keys: Sequence[int], num_tokens: int, avoid: Sequence[str]) -> Reservation:
        """While no worker lives it waits for one."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return self.decode.route(keys, num_tokens, avoid)
            except NoWorkerError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
                try:
                    async with asyncio.timeout(left_s):
                        await self._joined.wait()
                except TimeoutError:
                    raise NoWorkerError("no decode worker has come back: the cluster cannot answer") from None

    def prefill_elsewhere(
        self, placed: Placed, place: Reservation, num_tokens: int, keys: Sequence[int]
    ) -> Reservation | None:
        """A place on the worker that computes the prompt's blocks; None: the decode worker computes it all."""
        if len(keys) <= place.num_cached_blocks:
            placed.reason = "all of it is cached here"
            return None
        try:
            there = self.prefill.route(keys, num_tokens)
        except NoWorkerError:
            return None
        decision = self._policy.decide(self._situation(num_tokens, place, there))
        placed.reason = decision.reason
        if not decision.remote:
            there.close()
            return None
        place.compute_elsewhere(num_tokens - len(keys) * self.prefill.block_size)
        placed.prefill_worker_id = there.worker_id
        return there

    def _situation(self, num_tokens: int, here: Reservation, there: Reservation) -> Situation:
        decode, prefill = self.decode, self.prefill
        return Situation(
            num_prompt_tokens=num_tokens,
            num_cached_here=min(here.num_cached_blocks * decode.block_size, num_tokens - 1),
            here=decode.load(here.worker_id).without(here.num_new_tokens),
            num_cached_there=min(there.num_cached_blocks * prefill.block_size, num_tokens - 1),
            there=prefill.load(there.worker_id).without(there.num_new_tokens),
        )
