"""Which worker gets a prompt, among those of one role. The table:

    round_robin   in turn
    random        any
    power_of_two  of two at random, the one with fewer requests
    dynamo        Dynamo's cost in blocks: prompt blocks to compute, those already queued, and blocks in use
    kv_aware      seconds, by measured passes: until this first token, and that it adds to the streams that run there

Each returns a position among the candidates, of which there is at least one: none of them can fail to choose.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.loads import Candidates
from paceline.cluster.policy import build_choice, parse_choice
from paceline.cluster.prefill_time import PrefillTime
from paceline.errors import InvalidOptionError


class Chooser(Protocol):
    def choose(self, candidates: Candidates, dice: random.Random) -> int: ...


@dataclass(slots=True)
class RoundRobin:
    _last: int = field(default=-1, init=False)  # slot: workers may come and go between two turns

    def choose(self, candidates: Candidates, dice: random.Random) -> int:
        position = int(np.searchsorted(candidates.slots, self._last, side="right")) % len(candidates.slots)
        self._last = int(candidates.slots[position])
        return position


@dataclass(frozen=True, slots=True)
class Random:
    def choose(self, candidates: Candidates, dice: random.Random) -> int:
        return dice.randrange(len(candidates.slots))


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    def choose(self, candidates: Candidates, dice: random.Random) -> int:
        first, second = dice.randrange(len(candidates.slots)), dice.randrange(len(candidates.slots))
        return min(first, second, key=lambda i: int(candidates.num_queued[i] + candidates.num_running[i]))


@dataclass(frozen=True, slots=True)
class DynamoBlocks:
    prefill_weight: float = 1.0  # of a block to compute beside one in use
    request_weight: float = 0.0  # of a request that runs
    temperature: float = 0.0  # 0: the least cost; above it a softmax over normalized costs

    def choose(self, candidates: Candidates, dice: random.Random) -> int:
        queued_blocks = candidates.queued_tokens / candidates.block_size
        to_compute = np.maximum(0, queued_blocks + candidates.num_prompt_blocks - candidates.cached_blocks)
        requests = candidates.num_queued + candidates.num_running
        cost = self.prefill_weight * to_compute + candidates.active_blocks + self.request_weight * requests
        if self.temperature <= 0:
            return _least(cost, dice)
        spread = float(np.ptp(cost)) or 1.0
        weights = np.exp(-(cost - cost.min()) / spread / self.temperature)
        return dice.choices(range(len(cost)), weights.tolist())[0]


@dataclass(frozen=True, slots=True)
class KVAware:
    time: PrefillTime
    output_tokens: int = 128  # expected of a request: a choice; at 0 the decoding that follows counts for nothing

    def choose(self, candidates: Candidates, dice: random.Random) -> int:
        return _least(self.waiting_s(candidates), dice)

    def waiting_s(self, candidates: Candidates) -> NDArray[np.float64]:
        """Added up over this request and the streams that it would hold up, per candidate."""
        running, cached = candidates.num_running, candidates.cached_tokens
        queue = self.time.prompts_s(candidates.queued_tokens, np.zeros_like(cached), running)
        prompt = self.time.prompts_s(candidates.num_prompt_tokens - cached, cached, running)
        # Every pass of the answer is longer by one more stream, for this request and for those that run or will run.
        streams = running + candidates.num_queued
        num_passes = self.output_tokens / self.time.spec.tokens_per_pass
        with_it_s = self.time.passes_s(streams + 1)
        decode_s = num_passes * (with_it_s + streams * (with_it_s - self.time.passes_s(streams)))
        total: NDArray[np.float64] = queue.seconds + prompt.seconds + running * prompt.delay_s + decode_s
        return total


def _least(cost: NDArray[Any], dice: random.Random) -> int:
    """Ties are broken at random: otherwise an empty cluster fills its first worker."""
    ties = np.flatnonzero(cost == cost.min())
    return int(ties[0] if ties.size == 1 else ties[dice.randrange(ties.size)])


CHOOSERS: dict[str, Callable[..., Chooser]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "power_of_two": PowerOfTwo,
    "dynamo": DynamoBlocks,
    "kv_aware": KVAware,
}
DEFAULT_CHOOSER = "kv_aware"


def make_chooser(text: str, time: PrefillTime | None = None) -> Chooser:
    """From `name,option=value,...`; `kv_aware` needs measured times."""
    name, options = parse_choice("router", text, tuple(CHOOSERS))
    given: dict[str, Any] = {}
    if name == "kv_aware":
        if time is None:
            raise InvalidOptionError("router kv_aware needs a measured pass cost: paceline bench curve --out FILE")
        given = {"time": time}
    chooser: Chooser = build_choice("router", CHOOSERS[name], name, options, given)
    return chooser
