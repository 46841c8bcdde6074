"""What is counted while a request runs, and where a step's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import RequestMetrics
from paceline.core.request import Request


@dataclass(slots=True)
class RequestTracker:
    """Times and counts of one request, from arrival to the last token."""

    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)

    def record(self, counts: DraftCounts) -> None:
        """`counts`: of a pass that emitted tokens just now."""
        now = time.perf_counter()
        self.first_token_s = self.first_token_s or now
        self.last_token_s = now
        self.counts.add(counts)

    def metrics(self, request: Request, lossy: bool) -> RequestMetrics:
        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - request.arrival_s

        tpot_s = None
        if self.first_token_s is not None and self.last_token_s is not None and request.num_new_tokens > 1:
            tpot_s = (self.last_token_s - self.first_token_s) / (request.num_new_tokens - 1)
        return RequestMetrics(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            counts=self.counts,
            queue_s=since_arrival(self.first_scheduled_s),
            ttft_s=since_arrival(self.first_token_s),
            tpot_s=tpot_s,
            e2e_s=since_arrival(self.last_token_s),
            lossy=lossy,
            draft_s=request.draft_s,
            arrival_s=request.arrival_s,
            num_preemptions=request.num_preemptions,
        )


@dataclass(slots=True)
class StepClock:
    """Seconds spent in each part of `EngineCore.step`, added up over all steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_ahead: int = 0  # of these, passes that were launched while the one before still ran

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def reset(self) -> None:
        self.seconds.clear()
        self.num_steps = self.num_ahead = 0
