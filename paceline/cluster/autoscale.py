"""How many workers of each role the traffic of the last minute needs, by what a worker was measured to do.

    replicas = ceil(rate / (HEADROOM x capacity(prompt length, answer length, hit rate, tokens per pass)))

More come at once; fewer only when fewer would have done for a whole window, because a worker that leaves takes its
cached prefixes with it and a new one takes seconds to load its model.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.cluster.capacity import capacity
from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.worker_spec import WorkerSpec
from paceline.errors import InvalidOptionError

WINDOW_S = 60.0  # half: reacts to bursts of a few requests; twice: a rise is followed a minute later
LEAST_WINDOW_S = 10.0  # a rate is not believed before
HEADROOM = 0.7  # of a worker's capacity: queues grow without bound as the load comes near it
UNKNOWN_OUTPUT = 128  # tokens of an answer, before the first one has ended


@dataclass(slots=True)
class Seen:
    """One request."""

    at_s: float
    num_prompt_tokens: int
    num_new_tokens: int = 0  # of its prompt, that were not cached where it went
    is_remote: bool = False  # a prefill worker computed its prompt
    num_output_tokens: int | None = None  # None: it has not ended


class Traffic:
    """The requests of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque()
        self._begin_s = time.monotonic()

    def note(self, num_prompt_tokens: int) -> Seen:
        seen = Seen(time.monotonic(), num_prompt_tokens, num_prompt_tokens)
        self._seen.append(seen)
        return seen

    def lately(self, now_s: float) -> tuple[list[Seen], float]:
        """These requests, and the seconds in which they came."""
        while self._seen and self._seen[0].at_s < now_s - WINDOW_S:
            self._seen.popleft()
        return list(self._seen), min(WINDOW_S, max(LEAST_WINDOW_S, now_s - self._begin_s))


@dataclass(frozen=True, slots=True)
class Limits:
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise InvalidOptionError(f"at least {self.least} and at most {self.most} workers: the first is larger")


class Autoscaler:
    def __init__(self, spec: WorkerSpec, limits: Mapping[str, Limits]) -> None:  # role -> limits
        self.limits = dict(limits)
        self._spec, self._time = spec, PrefillTime(spec)
        self._asked: deque[tuple[float, dict[str, int]]] = deque()

    def wanted(self, traffic: Traffic, now_s: float) -> dict[str, int]:
        """Workers of each role from now on: the most that any moment of the last window needed."""
        self._asked.append((now_s, self.needed(*traffic.lately(now_s))))
        while self._asked[0][0] < now_s - WINDOW_S:
            self._asked.popleft()
        return {role: max(asked[role] for _, asked in self._asked) for role in self.limits}

    def needed(self, seen: list[Seen], seconds: float) -> dict[str, int]:
        """By the formula, within the limits."""
        found = {"prefill": self._prefill(seen, seconds), "decode": self._decode(seen, seconds)}
        return {role: min(limit.most, max(limit.least, found[role])) for role, limit in self.limits.items()}

    def _prefill(self, seen: list[Seen], seconds: float) -> int:
        """Seconds of work that came in each second: prompts that go there."""
        work_s = sum(self._time.prompt_s(one.num_new_tokens).seconds for one in seen if one.is_remote)
        return math.ceil(work_s / seconds / HEADROOM)

    def _decode(self, seen: list[Seen], seconds: float) -> int:
        if not seen:
            return 0
        ended = [one.num_output_tokens for one in seen if one.num_output_tokens is not None]
        output = sum(ended) / len(ended) if ended else UNKNOWN_OUTPUT
        # a decode worker computes what a prefill worker does not
        prompt = sum(1 if one.is_remote else one.num_new_tokens for one in seen) / len(seen)
        rate = len(seen) / seconds
        return math.ceil(rate / (HEADROOM * capacity(self._spec, prompt, max(1.0, output), 0.0)))
