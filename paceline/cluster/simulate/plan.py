"""How many of which workers a load needs: a formula for a first guess, and simulated runs for the answer.

    replicas = ceil(rate / capacity(prompt length, answer length, hit rate, tokens per pass))

The formula knows no queues and no bursts, so it is too low for targets at a high percentile. The search starts from it,
and finds the smallest number of mixed workers, and for each number of prefill workers the smallest number of decode
workers, whose simulated run meets the targets. More workers are taken to be no worse.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.cluster.capacity import capacity
from paceline.cluster.choosers import DEFAULT_CHOOSER
from paceline.cluster.policy import DEFAULT_POLICY
from paceline.cluster.simulate.figures import Outcome
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.trace import Trace
from paceline.cluster.worker_spec import WorkerSpec
from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float | None = None
    gap_s: float | None = None  # between the items of a stream
    percent: float = 99.0

    def __post_init__(self) -> None:
        for name, value in (("TTFT", self.ttft_s), ("gap", self.gap_s)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InvalidOptionError(f"the {name} target must be above 0, got {value}")
        if not 0 < self.percent <= 100:
            raise InvalidOptionError(f"a percentile is above 0 and at most 100, got {self.percent}")


def replicas(rate: float, capacity_per_worker: float) -> int:
    return max(1, math.ceil(rate / capacity_per_worker))


@dataclass(slots=True)
class Planner:
    trace: Trace
    targets: Targets
    router: str = DEFAULT_CHOOSER
    policy: str = DEFAULT_POLICY
    max_workers: int = 64
    num_simulated: int = field(default=0, init=False)  # requests, in all runs

    def options(self, decode: WorkerSpec, prefill: WorkerSpec | None) -> Iterator[Outcome]:
        """Fleets that meet the targets, the one without prefill workers first; each as soon as it is found."""
        mixed = self._fewest(lambda count: Fleet(decode, count), decode)
        if mixed is not None:
            yield mixed
        if prefill is None:
            return
        most = mixed.num_workers if mixed is not None else self.max_workers
        best: float | None = None  # what the cheapest found so far costs
        for num_prefill in range(1, most):
            found = self._fewest(lambda count, p=num_prefill: Fleet(decode, count, prefill, p), decode)  # type: ignore[misc]
            if found is not None:
                yield found
                best = min(best or math.inf, _price(found))
            if best is not None and num_prefill * (prefill.dollars_per_hour or 1.0) >= best:
                return

    def _fewest(self, fleet: Callable[[int], Fleet], spec: WorkerSpec) -> Outcome | None:
        """The fewest decode workers that meet the targets: up in steps of two, then between the last two."""
        prompt, output = self.trace.mean_lengths()
        guess = replicas(self.trace.rate, capacity(spec, prompt, output, 0.0)) if math.isfinite(self.trace.rate) else 1
        low, high, found = 0, min(guess, self.max_workers), None
        while found is None:
            found = self._try(fleet(high))
            if found is None:
                if high >= self.max_workers:
                    return None
                low, high = high, min(2 * high, self.max_workers)
        while high - low > 1:
            middle = (low + high) // 2
            better = self._try(fleet(middle))
            if better is None:
                low = middle
            else:
                high, found = middle, better
        return found

    def _try(self, fleet: Fleet) -> Outcome | None:
        outcome = simulate(self.trace, fleet, self.router, self.policy)
        self.num_simulated += len(self.trace.requests)
        targets = self.targets
        return outcome if outcome.meets(targets.ttft_s, targets.gap_s, targets.percent) else None


def _price(outcome: Outcome) -> float:
    return outcome.dollars_per_hour or float(outcome.num_workers)
