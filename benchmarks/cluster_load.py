"""Workers as processes, a backend over them, and a load of timed requests: what benchmarks/cluster.py measures with."""

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.backend import ClusterBackend
from paceline.cluster.local import LocalWorker, LocalWorkers
from paceline.core.sampling_params import SamplingParams
from paceline.core.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ask:
    """One request of a load."""

    arrival_s: float
    prompt: list[int]
    num_tokens: int
    seed: int = 0
    temperature: float = 0.0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.num_tokens, temperature=self.temperature, seed=self.seed, ignore_eos=True, logprobs=0
        )


@dataclass
class Answered:
    ask: Ask
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    event_s: list[float] = field(default_factory=list)  # of each delta with tokens, since it was sent
    num_cached: int = 0
    num_passes: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]


@contextmanager
def fleet(command: Sequence[str], roles: Sequence[str]) -> Iterator[LocalWorkers]:
    workers = LocalWorkers([LocalWorker(f"{role}-{i}", role, command) for i, role in enumerate(roles)])
    workers.start()
    try:
        yield workers
    finally:
        workers.end()


def worker_command(model: str, num_threads: int, options: Sequence[str]) -> list[str]:
    own = ["--num-threads", str(num_threads), *options]
    return [sys.executable, "-m", "paceline", "cluster", "worker", model, *own]


async def run_load(backend: ClusterBackend, asks: Sequence[Ask]) -> list[Answered]:
    """Each request at its time, all answered."""
    await backend.start().tried()
    begin_s = time.perf_counter()

    async def at_its_time(index: int, ask: Ask) -> Answered:
        await asyncio.sleep(max(0.0, begin_s + ask.arrival_s - time.perf_counter()))
        return await _answer(backend, ask, index)

    try:
        return await asyncio.gather(*(at_its_time(i, ask) for i, ask in enumerate(asks)))
    finally:
        await backend.stop()


async def answer_all(backend: ClusterBackend, asks: Sequence[Ask], num_streams: int) -> list[Answered]:
    """So many at a time, whatever their times of arrival."""
    queue, found = list(enumerate(asks))[::-1], list[Answered]()

    async def client() -> None:
        while queue:
            index, ask = queue.pop()
            found.append(await _answer(backend, ask, index))

    await asyncio.gather(*(client() for _ in range(num_streams)))
    return found


async def _answer(backend: ClusterBackend, ask: Ask, index: int) -> Answered:
    found, sent_s = Answered(ask), time.perf_counter()
    try:
        async for output in backend.generate(ask.prompt, ask.params, f"load-{index}", ""):
            for sample in output.outputs:
                if sample.token_ids:
                    found.event_s.append(time.perf_counter() - sent_s)
                found.token_ids += sample.token_ids
                found.logprobs += [one.logprob for one in sample.token_logprobs or []]
            found.num_cached = output.num_cached_tokens or found.num_cached
            if output.metrics is not None:
                found.num_passes = output.metrics.num_steps
            if output.error is not None:
                found.error = str(output.error)
    except Exception as error:
        found.error = repr(error)
    return found


def words(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    """A prompt of exactly `count` tokens that no other seed shares."""
    dice, text = random.Random(seed), ["a", "tree", "stone", "river", "old", "green", "house", "over", "the", "bright"]
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += tokenizer.encode(f" {dice.choice(text)} {dice.randrange(1000)}")
    return tokens[:count]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    dice, now = random.Random(seed), 0.0
    times = []
    for _ in range(count):
        now += dice.expovariate(rate)
        times.append(now)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))] if ordered else float("nan")


def row(answers: Sequence[Answered]) -> dict[str, Any]:
    ttft, gaps = [one.ttft_s for one in answers if one.event_s], [gap for one in answers for gap in one.gaps_s]
    prompts = sum(len(one.ask.prompt) for one in answers)
    return {
        "requests": len(answers),
        "failed": sum(one.error is not None for one in answers),
        "TTFT p50 ms": 1e3 * percentile(ttft, 50),
        "TTFT p99 ms": 1e3 * percentile(ttft, 99),
        "gap p50 ms": 1e3 * percentile(gaps, 50),
        "gap p99 ms": 1e3 * percentile(gaps, 99),
        "hit rate": sum(one.num_cached for one in answers) / prompts,
    }
