"""What is counted while a request runs, and where a step's time goes."""

import time
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


class Phase:
    """A part of the step, while it is timed. No generator: that takes 30 us more right after a pass, when no code is in
    the caches."""

    __slots__ = ("_begin", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._begin = seconds, name, 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._begin


@dataclass(slots=True)
class StepClock:
    """Seconds spent in each part of `EngineCore.step`, added up over all steps."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_ahead: int = 0  # of these, passes that were launched while the one before still ran

    def phase(self, name: str) -> Phase:
        return Phase(self.seconds, name)

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def reset(self) -> None:
        self.seconds.clear()
        self.num_steps = self.num_ahead = 0
