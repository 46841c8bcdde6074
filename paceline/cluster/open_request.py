"""A request on its way, whoever computes it, and what it went through."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.autoscale import Seen
from paceline.cluster.delivery import Delivery
from paceline.cluster.link import WorkerLink
from paceline.cluster.placer import Placed
from paceline.cluster.router import Reservation


@dataclass(frozen=True, slots=True)
class Recovery:
    """One stream that lost its worker."""

    gap_s: float  # between the last item of the old worker and the first of the new one
    reason: str  # why the old one was lost
    waited: bool  # no decode worker was left: one had to come back first


@dataclass(slots=True, eq=False)
class OpenRequest:
    delivery: Delivery
    seen: Seen
    link: WorkerLink | None = None
    there: Reservation | None = None  # its prompt's place on a prefill worker, while it is computed
    placed: Placed | None = None
    items: list[dict[str, Any]] = field(default_factory=list)
    lost: str | None = None  # why its worker was lost
    heard_s: float = field(default_factory=time.monotonic)  # when its last item came, or else when it came itself
    resumes_after: str | None = None  # why its worker was lost, until the next one says something
    waited: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def leave_prefill(self) -> None:
        """Its blocks have come, or will not."""
        if self.there is not None:
            self.there.close()
            self.there = None

    def heard(self) -> Recovery | None:
        """An item with tokens came: the end of a recovery, where it is the first of a new worker."""
        now_s, found = time.monotonic(), None
        if self.resumes_after is not None:
            found = Recovery(now_s - self.heard_s, self.resumes_after, self.waited)
            self.resumes_after, self.waited = None, False
        self.heard_s = now_s
        return found
