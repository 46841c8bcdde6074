"""How requests arrive: a closed loop of so many users, or an open loop with Poisson arrivals.

Closed: `concurrency` users, each asking the next question as soon as the last one is answered. Open: requests arrive at
a rate whether or not the server keeps up, which is what shows queues.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.run.backend import Answer, Backend, Sampling
from paceline.bench.workloads.workload import Prompt
from paceline.errors import InvalidOptionError

Progress = Callable[[int, int], None]  # (answered, all)


@dataclass(frozen=True, slots=True)
class Load:
    """Exactly one of the two is given."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise InvalidOptionError("a load is a concurrency (closed loop) or a rate per second (open loop), not both")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidOptionError(f"concurrency must be 1 or more, got {self.concurrency}")
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise InvalidOptionError(f"a rate must be above 0 requests per second, got {self.rate_per_s}")

    @property
    def name(self) -> str:
        return f"{self.concurrency}" if self.concurrency is not None else f"{self.rate_per_s:g}/s"


async def offer(
    backend: Backend,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    load: Load,
    progress: Progress | None = None,
) -> list[Answer]:
    """Ask everything, in the load's way; answers in the order of the prompts."""
    answers: list[Answer | None] = [None] * len(prompts)
    num_answered = 0

    async def ask(index: int) -> None:
        nonlocal num_answered
        answers[index] = await backend.generate(prompts[index], sampling, index)
        num_answered += 1
        if progress is not None:
            progress(num_answered, len(prompts))

    if load.concurrency is not None:
        await _closed_loop(ask, len(prompts), load.concurrency)
    else:
        assert load.rate_per_s is not None
        await _open_loop(ask, len(prompts), load.rate_per_s, sampling.seed)
    return [answer for answer in answers if answer is not None]


async def _closed_loop(ask: Callable[[int], Awaitable[None]], count: int, concurrency: int) -> None:
    waiting = iter(range(count))

    async def user() -> None:
        for index in waiting:  # one iterator for all users: each takes the next open question
            await ask(index)

    await asyncio.gather(*(user() for _ in range(min(concurrency, count))))


async def _open_loop(ask: Callable[[int], Coroutine[Any, Any, None]], count: int, rate_per_s: float, seed: int) -> None:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    tasks = []
    for index in range(count):
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        tasks.append(asyncio.create_task(ask(index)))
        due_s += rng.expovariate(rate_per_s)
    await asyncio.gather(*tasks)
