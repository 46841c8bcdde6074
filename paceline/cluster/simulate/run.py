"""The run of a trace through a cluster: arrivals, routes, prompts computed here or there, transfers, ends.

>>> spec = WorkerSpec("toy", PassCost.of({1: 0.010, 64: 0.020}))
>>> outcome = simulate(Synthetic(requests=50, rate=2.0).trace(), Fleet(spec, 2))
>>> outcome.num_workers
2
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.cluster.choosers import DEFAULT_CHOOSER, make_chooser
from paceline.cluster.policy import DEFAULT_POLICY, Policy, Situation, make_policy
from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.router import Reservation, Router
from paceline.cluster.simulate.figures import Gaps, Outcome
from paceline.cluster.simulate.job import Job
from paceline.cluster.simulate.trace import Trace
from paceline.cluster.simulate.worker import News, SimulatedWorker
from paceline.cluster.worker_spec import WorkerSpec
from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class Fleet:
    """Decode workers read prompts too, unless a prefill worker does it for them."""

    decode: WorkerSpec
    num_decode: int
    prefill: WorkerSpec | None = None
    num_prefill: int = 0

    def __post_init__(self) -> None:
        if self.num_decode < 1 or self.num_prefill < 0 or (self.num_prefill and self.prefill is None):
            raise InvalidOptionError(
                f"a cluster has 1 decode worker or more, got {self.num_decode} and {self.num_prefill} for prefill"
            )

    @property
    def num_workers(self) -> int:
        return self.num_decode + self.num_prefill

    @property
    def dollars_per_hour(self) -> float:
        prefill = self.prefill.dollars_per_hour * self.num_prefill if self.prefill else 0.0
        return self.decode.dollars_per_hour * self.num_decode + prefill

    def __str__(self) -> str:
        decode = f"{self.num_decode} x {self.decode.name}"
        return f"{self.num_prefill} x {self.prefill.name} + {decode}" if self.num_prefill and self.prefill else decode


def simulate(
    trace: Trace, fleet: Fleet, router: str = DEFAULT_CHOOSER, policy: str = DEFAULT_POLICY, seed: int = 0
) -> Outcome:
    return _Simulation(trace, fleet, router, policy, seed).run()


TAKEN = 16  # blocks that are written between two passes: fetch.BATCH


class _Side:
    """The workers of one role and their router."""

    def __init__(self, role: str, spec: WorkerSpec, count: int, block_size: int, router: str, seed: int) -> None:
        # blocks as large as the trace's, in the same memory
        num_blocks = max(1, spec.num_kv_blocks * spec.block_size // block_size)
        self.time = PrefillTime(spec.replace(block_size=block_size, num_kv_blocks=num_blocks))
        self.router = Router(make_chooser(router, self.time), block_size, seed)
        self.gaps = Gaps(spec.pass_spread)
        self.workers: dict[str, SimulatedWorker] = {}
        for i in range(count):
            worker = SimulatedWorker(f"{role}-{i}", self.time, self.gaps)
            self.workers[worker.worker_id] = worker
            self.router.add(worker.worker_id)

    def store(self, worker: SimulatedWorker, keys: tuple[int, ...]) -> None:
        new, removed = worker.cache.store(keys)
        if new:
            self.router.stored(worker.worker_id, new)
        if removed:
            self.router.removed(worker.worker_id, removed)


class _Simulation:
    def __init__(self, trace: Trace, fleet: Fleet, router: str, policy: str, seed: int) -> None:
        self.trace, self.fleet = trace, fleet
        self.decode = _Side("decode", fleet.decode, fleet.num_decode, trace.block_size, router, seed)
        prefill = fleet.prefill or fleet.decode
        self.prefill = _Side("prefill", prefill, fleet.num_prefill, trace.block_size, router, seed + 1)
        self.policy: Policy = make_policy(policy, self.decode.time, self.prefill.time)
        count = len(trace.requests)
        self.ttft_s, self.e2e_s = np.zeros(count), np.zeros(count)
        self.num_computed = self.num_remote = 0  # prompt tokens, and prompts
        self.here: dict[int, Reservation] = {}  # request -> its place on a decode worker
        self.there: dict[int, Reservation] = {}
        self.events: list[tuple[float, int, Callable[[float], None]]] = []  # heap
        self.order = itertools.count()
        self.sides: dict[str, _Side] = {}  # of workers that slow each other down, by name
        for side in (self.decode, self.prefill):
            if side.time.spec.slowdown is not None:
                self.sides |= dict.fromkeys(side.workers, side)
        for name, side in self.sides.items():
            others = [other.workers[other_name] for other_name, other in self.sides.items() if other_name != name]
            side.workers[name].neighbours = others

    def run(self) -> Outcome:
        requests, events = self.trace.requests, self.events
        now, arrived = 0.0, 0
        while arrived < len(requests) or events:
            if not events or (arrived < len(requests) and requests[arrived].arrival_s <= events[0][0]):
                now = requests[arrived].arrival_s
                self._arrive(arrived, now)
                arrived += 1
            else:
                now, _, happen = heapq.heappop(events)
                happen(now)
        assert not self.here and not self.there, "a request got lost"
        return self._outcome(now - requests[0].arrival_s)

    def _outcome(self, duration_s: float) -> Outcome:
        requests = self.trace.requests
        return Outcome(
            fleet=str(self.fleet),
            num_workers=self.fleet.num_workers,
            dollars_per_hour=self.fleet.dollars_per_hour,
            ttft_s=self.ttft_s,
            e2e_s=self.e2e_s,
            num_output_tokens=np.array([request.num_output_tokens for request in requests]),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
            num_computed_tokens=self.num_computed,
            num_remote=self.num_remote,
            gaps=self.decode.gaps,
            duration_s=duration_s,
        )

    def _arrive(self, index: int, now: float) -> None:
        request = self.trace.requests[index]
        here = self.here[index] = self.decode.router.route(request.keys, request.num_prompt_tokens)
        num_full = len(request.keys) * self.trace.block_size  # tokens that can travel
        is_new = len(request.keys) > here.num_cached_blocks
        if self.fleet.num_prefill and is_new and self._goes_elsewhere(index, here):
            here.compute_elsewhere(request.num_prompt_tokens - num_full)
            self.num_remote += 1
            self._add(self.prefill, self.there[index].worker_id, Job(index, request.keys, num_full, 0), now)
        else:
            job = Job(index, request.keys, request.num_prompt_tokens, request.num_output_tokens)
            self._add(self.decode, here.worker_id, job, now)

    def _goes_elsewhere(self, index: int, here: Reservation) -> bool:
        """Asks the policy; where it says yes, a place there is reserved."""
        request, size = self.trace.requests[index], self.trace.block_size
        there = self.prefill.router.route(request.keys, request.num_prompt_tokens)
        load, mine = self.prefill.router.load(there.worker_id), self.decode.router.load(here.worker_id)
        situation = Situation(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_here=min(here.num_cached_blocks * size, request.num_prompt_tokens - 1),
            here=mine.without(here.num_new_tokens),
            num_cached_there=min(there.num_cached_blocks * size, request.num_prompt_tokens - 1),
            there=load.without(there.num_new_tokens),
        )
        if self.policy.decide(situation).remote:
            self.there[index] = there
            return True
        there.close()
        return False

    def _add(self, side: _Side, worker_id: str, job: Job, now: float) -> None:
        worker = side.workers[worker_id]
        idle = worker.stretch is None
        if worker.add(job, now):
            if idle:
                self._begin(side, worker, now, None)
            else:
                self._schedule(side, worker)

    def _begin(self, side: _Side, worker: SimulatedWorker, now: float, did: str | None) -> None:
        """The next stretch, after one in which it `did` this."""
        self._tell(side, worker, worker.begin(now), now)
        if worker.stretch is not None:
            self._schedule(side, worker)
        if worker.does != did:
            for neighbour in worker.neighbours:  # whose passes take more time from now on, or less
                if neighbour.look_around(now):
                    self._schedule(self.sides[neighbour.worker_id], neighbour)

    def _schedule(self, side: _Side, worker: SimulatedWorker) -> None:
        stretch = worker.stretch
        assert stretch is not None
        end_s = stretch.end_s

        def happen(now: float) -> None:
            if (
                worker.stretch is stretch and stretch.end_s == end_s
            ):  # otherwise it ended before, or ends at another time
                did = worker.does
                self._tell(side, worker, worker.end(), now)
                self._begin(side, worker, now, did)

        self._at(end_s, happen)

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), happen))

    def _tell(self, side: _Side, worker: SimulatedWorker, news: News, now: float) -> None:
        way_s = side.time.spec.request_s
        for job in news.read:
            side.store(worker, job.keys)
            self.num_computed += job.num_prompt_tokens - job.num_cached
            if side is self.prefill:
                self._send(job, now)
            else:
                self.here[job.request].first_token()
                self.ttft_s[job.request] = way_s + now - self.trace.requests[job.request].arrival_s
        for job in news.finished:
            if side is self.decode:
                self.here.pop(job.request).close()
                self.e2e_s[job.request] = way_s + now - self.trace.requests[job.request].arrival_s

    def _send(self, job: Job, now: float) -> None:
        """What is left of its blocks goes over the link: those of the last pass, and what the link had no time for
        before. The request then runs as one whose prefix is cached."""
        self.there.pop(job.request).close()
        request, here = self.trace.requests[job.request], self.here[job.request]
        worker = self.decode.workers[here.worker_id]
        num_sent = (len(job.keys) - worker.cache.match(job.keys)) * self.trace.block_size
        whole = Job(job.request, request.keys, request.num_prompt_tokens, request.num_output_tokens)

        def come(then: float) -> None:
            self.decode.store(worker, job.keys)
            self._add(self.decode, here.worker_id, whole, then)

        num_last, began_s = min(num_sent, job.num_last), now if job.first_s is None else job.first_s
        left_s = self.decode.time.spec.transfer_left_s(num_sent, num_last, now - began_s)
        is_first = began_s == now  # then room is reserved now too
        waits_s = worker.wait_s(now, is_first + max(1, -(-num_last // (TAKEN * self.trace.block_size))))
        self._at(now + left_s + waits_s, come)
