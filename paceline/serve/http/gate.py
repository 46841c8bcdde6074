"""Which requests may run or wait, and how each of them ends.

The gate counts sequences (prompts x n). What runs plus what waits is bounded; past that a client is told to come back.
Each request holds a `Ticket`: its deadline, the client hanging up and the server going down all end it the same way,
by moving one deadline to now. So there is a single place where a request can be cut short, and it says why.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from paceline.serve.http.errors import ApiError

MAX_RETRY_AFTER_S = 60
SMOOTHING = 0.1  # weight of the newest request in the running mean of service times

TIMEOUT, GONE, SHUTDOWN = "timeout", "client_gone", "shutdown"


class Ticket:
    """A request's right to run, until `limit_s` from now."""

    def __init__(self, num_sequences: int, limit_s: float) -> None:
        self.num_sequences = num_sequences
        self.limit_s = limit_s
        self.begin_s = time.perf_counter()
        self.ended_by: str | None = None
        self._scope: asyncio.Timeout | None = None

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """Around all the work; raises TimeoutError once `end` was called or time is up."""
        now = asyncio.get_running_loop().time()
        left_s = self.limit_s - (time.perf_counter() - self.begin_s)
        async with asyncio.timeout_at(now if self.ended_by else now + left_s) as self._scope:
            try:
                yield
            finally:
                self._scope = None

    def end(self, reason: str) -> None:
        self.ended_by = self.ended_by or reason
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def error(self) -> ApiError:
        """Why the scope ended, for the client."""
        if self.ended_by == SHUTDOWN:
            return shutting_down()
        return ApiError(
            408, f"the request took longer than the server allows ({self.limit_s:g} s): ask for less", code=TIMEOUT
        )


class Gate:
    def __init__(self, max_running: int, max_queue_len: int, timeout_s: float) -> None:
        self.max_running = max_running
        self.capacity = max_running + max_queue_len
        self.num_sequences = 0
        self.draining = False
        self._timeout_s = timeout_s
        self._tickets: set[Ticket] = set()
        self._mean_service_s = 1.0

    @property
    def num_requests(self) -> int:
        return len(self._tickets)

    @contextmanager
    def enter(self, num_sequences: int) -> Iterator[Ticket]:
        self._check(num_sequences)
        ticket = Ticket(num_sequences, self._timeout_s)
        self._tickets.add(ticket)
        self.num_sequences += num_sequences
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)
            self.num_sequences -= num_sequences
            served_s = time.perf_counter() - ticket.begin_s
            self._mean_service_s += SMOOTHING * (served_s - self._mean_service_s)

    def _check(self, num_sequences: int) -> None:
        if self.draining:
            raise shutting_down()
        if num_sequences > self.capacity:
            raise ApiError(
                400,
                f"this call asks for {num_sequences} sequences (prompts x n) and the server holds {self.capacity}: "
                "split it into several calls",
                code="too_many_choices",
            )
        if self.num_sequences + num_sequences > self.capacity:
            wait_s = self.retry_after_s()
            raise ApiError(
                429,
                f"the server is full ({self.num_sequences} sequences running or waiting): try again in {wait_s} s",
                code="queue_full",
                headers={"Retry-After": str(wait_s)},
            )

    def retry_after_s(self) -> int:
        """About how long until the queue has moved up by one round of running requests."""
        rounds = max(1.0, self.num_sequences / self.max_running)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_service_s * rounds)))

    def drain(self) -> None:
        """Take no new requests."""
        self.draining = True

    def end_all(self) -> None:
        for ticket in list(self._tickets):
            ticket.end(SHUTDOWN)


def shutting_down() -> ApiError:
    message = "the server is shutting down: send the request again elsewhere or later"
    return ApiError(503, message, code=SHUTDOWN, headers={"Retry-After": "5"})
