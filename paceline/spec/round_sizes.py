"""Which size of draft pays on the device, for so many requests: the price rule of `auto` with what a GPU knows.

What a round and a plain pass take is measured for every captured size when the engine starts, and corrected by what
they take while they run, the host included. What a round brings is learned as well: an option's gain, tokens per
request and round beyond the first, is its usual gain times one *level*, which every collected round corrects. Taken is
the option with the most tokens per second, counted for the slowest of the requests: those that were asked together are
done when the last one is. Where that is plain decoding, because drafts bring too little, they are tried again after a
while.

At the start every size runs over padding, without keys and without the host's work: it looks faster than it is. What
has not run yet is therefore slowed down as much as what has; otherwise each would be tried in turn.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.spec.proposer import Budget


class SizeOption(NamedTuple):
    nodes: int
    depth: int
    gain: float  # tokens per pass beyond the first, as usual

    @property
    def budget(self) -> Budget:
        return Budget(self.nodes, self.depth)


# Tokens per pass do not depend on the machine. The gains of `eagle3` are those of the shipped drafter, greedy, over
# Spec-Bench prompts (2 and 15 nodes counted in bfloat16 on a GPU, the others, and those of `ngram` and `medusa`, on a
# CPU). Of another drafter, and of other texts, the level makes up for the difference.
EAGLE_OPTIONS = (
    SizeOption(2, 2, 0.94),
    SizeOption(4, 4, 1.25),
    SizeOption(7, 4, 1.55),
    SizeOption(15, 6, 2.01),
)
# Where it depends on the user's models, the gains are those of chains of which 0.6 is accepted at each level.
CHAIN_OPTIONS = (SizeOption(2, 2, 0.96), SizeOption(4, 4, 1.31), SizeOption(7, 7, 1.46))
OPTIONS: dict[str, tuple[SizeOption, ...]] = {  # of each method that has rounds, the largest last
    "eagle3": EAGLE_OPTIONS,
    "eagle": EAGLE_OPTIONS,
    "medusa": (SizeOption(2, 2, 0.34), SizeOption(4, 4, 0.36), SizeOption(7, 4, 0.63), SizeOption(15, 4, 0.75)),
    "layer_skip": CHAIN_OPTIONS,
    "ngram": (SizeOption(2, 2, 0.48), SizeOption(4, 4, 0.60), SizeOption(7, 4, 0.68), SizeOption(15, 6, 0.81)),
}


def largest_of(method: str) -> Budget:
    return OPTIONS[method][-1].budget


WINDOW = 128  # rounds of one request that the level is the mean of, roughly
PRIOR = 4  # as many rounds the level's beginning is worth
TIME_SHARE = 1 / 32  # of the newest time, in the time of a size; larger as long as it ran seldom
MOST_SLOWDOWN = 1.3  # of a size that has not run yet; on a GPU all were slowed down by about 1.2
TOO_LONG = 4.0  # times what is known: a pause of the host, which says nothing
TOO_LONG_PLAIN = 1.5  # a pass with prompts, which is none of plain decoding
LEAST_ROUNDS = 16  # of a size, before another one is considered
CLEARLY = 1.08  # faster by so much, for a change to another size: that takes a turn of the host
PLAINLY = 1.01  # and so much for one to plain decoding, which nothing may be slower than
# Of a request's gain, from text to text: a standard deviation, over the mean. Counted on a GPU, 8 requests at a time:
# the slowest had 0.65 of the mean gain when greedy, with 2 nodes as with 15, and 0.83 to 0.9 at temperature 1.
SPREAD = 0.22
# Host time of a round, which takes longer than the device where many requests share it: a beginning, like the times
# that are measured on the device.
HOST_S, HOST_S_EACH = 0.3e-3, 0.06e-3
# Plain steps after which drafts that did not pay are tried again: a trial takes about 16 rounds. Twice as many after
# each trial that failed.
PATIENCE, MOST_PATIENCE = 2048, 32768


class RoundSizes:
    def __init__(
        self,
        times: Mapping[int, Sequence[float | None]],
        options: Sequence[SizeOption],
    ) -> None:
        """`times`: captured number of requests -> seconds of a plain pass, then of a round of each option; None: there
        is no such size."""
        self.options = tuple(options)
        self._times: dict[int, list[float | None]] = {}
        for count, (plain, *rounds) in sorted(times.items()):
            least = HOST_S + HOST_S_EACH * count
            self._times[count] = [plain, *(None if one is None else max(one, least) for one in rounds)]
        self._first = {count: list(each) for count, each in self._times.items()}
        self._num_timed: dict[tuple[int, int], int] = {}  # captured number of requests, option + 1
        self.level = 1.0
        self._count = PRIOR  # rounds that the level is made of
        self._num_rests, self._patience = 0, PATIENCE
        self._chosen: dict[int, int] = {}  # captured number of requests -> option + 1; 0: plain decoding
        self._held = 0  # rounds for which a choice stands

    def choose(self, num_requests: int) -> SizeOption | None:
        """None: plain decoding is faster."""
        bucket = self._bucket(num_requests)
        if bucket is None:
            return None
        known = self._chosen.get(bucket)
        if known is None or self._held <= 0:
            known = self._chosen[bucket] = self._best(bucket, known)
            self._held = LEAST_ROUNDS
        return None if known == 0 else self.options[known - 1]

    def option_of(self, budget: Budget) -> SizeOption | None:
        return next((option for option in self.options if option.budget == budget), None)

    def learn(
        self,
        option: SizeOption,
        num_requests: int,
        num_tokens: int,
        seconds: float | None,
        captured: int | None = None,
    ) -> None:
        """What a round brought to all of its requests; how long it took, where that is known. `captured`: the number of
        requests that it was captured for, where that is not the next one."""
        self._held -= 1
        self._num_rests = 0
        seen = (num_tokens / num_requests - 1.0) / option.gain
        self._count = min(self._count + num_requests, max(WINDOW, num_requests))
        self.level += num_requests / self._count * (seen - self.level)
        if self._count >= WINDOW:
            self._patience = PATIENCE
        self._learn_time(captured or num_requests, 1 + self.options.index(option), seconds, TOO_LONG)

    def rest(self, num_requests: int, seconds: float | None) -> None:
        """A plain step was taken; how long it took, where that is known."""
        self._learn_time(num_requests, 0, seconds, TOO_LONG_PLAIN)
        self._held -= 1
        self._num_rests += 1
        if self.level < 1.0 and self._num_rests >= self._patience:
            self.level, self._count, self._num_rests = 1.0, PRIOR, 0
            self._patience = min(2 * self._patience, MOST_PATIENCE)

    def speeds(self, num_requests: int) -> dict[str, float]:
        """Tokens per second that are expected of each size."""
        bucket = self._bucket(num_requests)
        if bucket is None:
            return {}
        names = ["plain", *(f"{option.nodes} nodes" for option in self.options)]
        return {names[i]: num_requests * speed for i, speed in self._speeds(bucket).items()}

    def _bucket(self, num_requests: int) -> int | None:
        return next((count for count in self._times if count >= num_requests), None)

    def _speeds(self, bucket: int) -> dict[int, float]:
        """Tokens per second of one request, the slowest of so many."""
        slowest = max(0.0, 1.0 - SPREAD * _highest_of(bucket))
        tokens = [1.0, *(1.0 + slowest * option.gain * self.level for option in self.options)]
        pairs = enumerate(zip(tokens, self._seconds(bucket), strict=True))
        return {i: count / seconds for i, (count, seconds) in pairs if seconds is not None}

    def _seconds(self, bucket: int) -> list[float | None]:
        """What each size takes; one that has not run for so many requests: as much longer than at the start as those
        that have."""
        times, first = self._times[bucket], self._first[bucket]
        ratios = [
            now / before
            for place, (now, before) in enumerate(zip(times, first, strict=True))
            if now is not None and before is not None and (bucket, place) in self._num_timed
        ]
        slowdown = min(MOST_SLOWDOWN, sum(ratios) / len(ratios)) if ratios else 1.0
        return [
            one if one is None or (bucket, place) in self._num_timed else slowdown * one
            for place, one in enumerate(times)
        ]

    def _best(self, bucket: int, known: int | None) -> int:
        speeds = self._speeds(bucket)
        best = max(speeds, key=speeds.__getitem__)
        enough = PLAINLY if best == 0 else CLEARLY
        return best if known is None or speeds[best] >= enough * speeds[known] else known

    def _learn_time(self, num_requests: int, place: int, seconds: float | None, too_long: float) -> None:
        bucket = self._bucket(num_requests)
        if bucket is None or seconds is None:
            return
        known = self._seconds(bucket)[place]
        if known is not None and seconds < too_long * known:
            count = self._num_timed[bucket, place] = self._num_timed.get((bucket, place), 0) + 1
            self._times[bucket][place] = known + max(TIME_SHARE, 1 / (1 + count)) * (seconds - known)


def _highest_of(count: int) -> float:
    """How many standard deviations the highest of so many numbers lies above their mean, roughly."""
    return 0.75 * math.sqrt(2.0 * math.log(count))
