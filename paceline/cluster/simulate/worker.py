"""One simulated worker: passes of measured length over the streams that decode and a chunk of the prompts that wait.

Passes that do the same are one event: a stretch of `num_passes` passes with the same streams and the same prompt rows.
It ends when a stream or a prompt ends, or at the next pass after a request came. Prompts share a pass as the engine's
scheduler does it, with the engine's own account of what a row takes: with `max_token_delay_s` a quarter of the time is
for the oldest prompt and the rest for the shortest; that account changes from pass to pass, so each is an event.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from paceline.cluster.prefill_time import CONTEXT_UNIT, LEAST_ROWS, SOLO_DELAYS, PrefillTime
from paceline.cluster.simulate.figures import Gaps
from paceline.cluster.simulate.job import Job
from paceline.cluster.simulate.lru_cache import LRUCache
from paceline.cluster.simulate.stretch import Stretch
from paceline.engine.row_cost import RowCost

OLDEST_SHARE = 0.25  # as in engine/scheduler.py
MOST_LEARNED = 8  # passes of a stretch that the account of rows learns from: after these it has settled


@dataclass(slots=True)
class News:
    """What the end of a stretch, or an admission, brought."""

    read: list[Job] = field(default_factory=list)  # their prompts are computed: the first token is there
    finished: list[Job] = field(default_factory=list)


class SimulatedWorker:
    def __init__(self, worker_id: str, time: PrefillTime, gaps: Gaps) -> None:
        self.worker_id = worker_id
        self.time = time
        self.cache = LRUCache(time.spec.num_kv_blocks)
        self.stretch: Stretch | None = None
        self.neighbours: list[SimulatedWorker] = []  # on the same host, where that matters
        self._gaps = gaps
        self._row_cost = RowCost()
        self._waiting: deque[Job] = deque()
        self._prompts: list[Job] = []  # admitted, the oldest first
        self._running: list[tuple[int, int, Job]] = []  # heap: (last pass, order, job)
        self._num_passes = 0
        self._num_tokens = 0  # of admitted jobs
        self._context = 0.0  # tokens before the streams' next ones, added up
        self._order = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, job: Job, now: float) -> bool:
        """True when the end of the stretch changed: a request is taken in at the next pass."""
        self._waiting.append(job)
        stretch = self.stretch
        if stretch is None:
            return True
        if len(self._prompts) + len(self._running) >= self.time.spec.max_num_seqs:
            return False  # no seat: nothing changes before a stream ends
        return self.cut(now)

    def cut(self, now: float) -> bool:
        """End the stretch with the pass that runs; False: it ends there anyway, or nothing runs."""
        stretch = self.stretch
        if stretch is None:
            return False
        num_passes = max(1, math.ceil(stretch.num_done(now)))
        if num_passes >= stretch.num_passes:
            return False
        stretch.num_passes = num_passes
        return True

    def wait_s(self, now: float, num_calls: int) -> float:
        """Until something was done so many times between two passes: blocks are taken in between passes only."""
        stretch = self.stretch
        if stretch is None:
            return 0.0
        return stretch.now_pass_s * (num_calls - stretch.num_done(now) % 1)

    @property
    def does(self) -> str | None:
        return None if self.stretch is None else self.stretch.kind

    def look_around(self, now: float) -> bool:
        """Its passes take as long as what its neighbours do from now on lets them. True: the stretch ends at another
        time."""
        stretch, slowdown = self.stretch, self.time.spec.slowdown
        if stretch is None or slowdown is None:
            return False
        others = (neighbour.does for neighbour in self.neighbours)
        return stretch.go_on(now, slowdown.factor(stretch.kind, (other for other in others if other is not None)))

    def begin(self, now: float) -> News:
        """Admit what waits and plan the next stretch; `stretch` is None when there is nothing to do."""
        news = self._admit()
        self.stretch = self._plan(now)
        self.look_around(now)
        return news

    def end(self) -> News:
        """The stretch is over: what it did."""
        stretch, spec = self.stretch, self.time.spec
        assert stretch is not None
        news, streams, spans = News(), len(self._running), stretch.ended()
        if streams:
            for seconds, num_passes in spans:
                self._gaps.note(seconds, streams * num_passes)
            self._context += streams * stretch.num_passes * spec.tokens_per_pass
        self._num_passes += stretch.num_passes
        if spec.max_token_delay_s is not None:
            for seconds in _latest(spans, MOST_LEARNED):
                self._row_cost.learn(stretch.num_rows, stretch.num_context, seconds)
        while self._running and self._running[0][0] <= self._num_passes:
            self._leave(heapq.heappop(self._running)[2], news)
        for job, rows in stretch.rows:
            job.first_s = stretch.start_s + spans[0][0] if job.first_s is None else job.first_s
            job.num_last = rows
            job.num_left -= rows * stretch.num_passes
            if job.num_left == 0:
                self._prompts.remove(job)
                self._read(job, news)
        self.stretch = None
        return news

    def _admit(self) -> News:
        news, spec = News(), self.time.spec
        capacity = spec.num_kv_blocks * spec.block_size
        while self._waiting and len(self._prompts) + len(self._running) < spec.max_num_seqs:
            job = self._waiting[0]
            if self._num_tokens and self._num_tokens + job.num_tokens > capacity:
                break
            self._waiting.popleft()
            found = self.cache.match(job.keys) * spec.block_size
            # the last token of a prompt is computed, unless only its blocks are wanted
            job.num_cached = min(found, job.num_prompt_tokens - (1 if job.num_output_tokens else 0))
            job.num_left = job.num_prompt_tokens - job.num_cached
            self._num_tokens += job.num_tokens
            if job.num_left:
                self._prompts.append(job)
            else:
                self._read(job, news)
        return news

    def _read(self, job: Job, news: News) -> None:
        news.read.append(job)
        if job.num_output_tokens <= 1:
            self._num_tokens -= job.num_tokens
            news.finished.append(job)
            return
        num_passes = math.ceil((job.num_output_tokens - 1) / self.time.spec.tokens_per_pass)
        self._order += 1
        heapq.heappush(self._running, (self._num_passes + num_passes, self._order, job))
        self._context += job.num_prompt_tokens

    def _leave(self, job: Job, news: News) -> None:
        self._num_tokens -= job.num_tokens
        self._context = max(0.0, self._context - job.num_tokens) if self._running else 0.0
        news.finished.append(job)

    def _plan(self, now: float) -> Stretch | None:
        if not self._prompts and not self._running:
            return None
        rows, spec = self._share() if self._prompts else [], self.time.spec
        num_rows = sum(count for _, count in rows)
        num_passes = min((job.num_left // count for job, count in rows), default=2**30)
        if rows and spec.max_token_delay_s is not None:
            num_passes = 1
        if self._running:
            num_passes = min(num_passes, self._running[0][0] - self._num_passes)
        pass_s, num_context = self.time.rows_s(len(self._running), num_rows), 0.0
        if spec.context_s or spec.stream_context_s or spec.max_token_delay_s is not None:
            streams = self._context + len(self._running) * num_passes * spec.tokens_per_pass / 2
            num_context = streams * spec.rows_per_stream + _prompt_contexts(rows, num_passes)
            pass_s += (spec.context_s * num_context + spec.stream_context_s * streams) / CONTEXT_UNIT
        num_rows += len(self._running) * spec.rows_per_stream
        return Stretch(now, pass_s, num_passes, rows, num_rows, int(num_context))

    def _share(self) -> list[tuple[Job, int]]:
        """Prompt rows of the next pass."""
        limit_s, left_rows = self.time.spec.max_token_delay_s, self.time.spec.max_num_batched_tokens
        left_rows = max(LEAST_ROWS, left_rows - len(self._running) * self.time.spec.rows_per_stream)
        if limit_s is None:
            return _in_order(self._prompts, left_rows)
        left_s = limit_s if self._running else limit_s * SOLO_DELAYS
        oldest, price = self._prompts[0], self._row_cost
        least, most = min(oldest.num_left, LEAST_ROWS), min(oldest.num_left, int(left_rows * OLDEST_SHARE))
        first = max(least, price.rows_within(left_s * OLDEST_SHARE, oldest.num_computed, most))
        shares = {oldest: first}
        left_s -= min(left_s * OLDEST_SHARE, first * price.at(oldest.num_computed))
        left_rows -= first
        for job in sorted(self._prompts, key=lambda job: job.num_left):
            known = shares.get(job, 0)
            more = price.rows_within(max(0.0, left_s), job.num_computed, min(job.num_left - known, max(0, left_rows)))
            if more:
                shares[job] = known + more
                left_s -= more * price.at(job.num_computed)
                left_rows -= more
        return list(shares.items())


def _prompt_contexts(rows: list[tuple[Job, int]], num_passes: int) -> float:
    """Of a pass's prompt rows, added up, in the middle of the stretch."""
    return sum(count * (job.num_computed + count * num_passes / 2) for job, count in rows)


def _latest(spans: list[tuple[float, int]], most: int) -> list[float]:
    """How long each of the last passes took."""
    found: list[float] = []
    for seconds, count in reversed(spans):
        found += [seconds] * min(count, most - len(found))
    return found[::-1]


def _in_order(prompts: list[Job], left_rows: int) -> list[tuple[Job, int]]:
    found = []
    for job in prompts:
        if left_rows <= 0:
            break
        found.append((job, min(job.num_left, left_rows)))
        left_rows -= found[-1][1]
    return found
