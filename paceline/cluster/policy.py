"""Where a prompt is computed: on the decode worker that will run the request, or on a prefill worker first.

A policy is a pure function of what is known when a request comes: how much of its prompt is new here and there, and who
is busy. The simulator and the live cluster use the same objects. The table:

    local         always here
    remote        always there, where a prefill worker lives
    dynamo        here if few tokens are new, both absolutely and as a share of the prompt, or if `there` is busy
    dynamo-queue  there if many tokens are new and the queue there is short (Dynamo's first releases)
    threshold     there if many tokens are new (llm-d's one knob)
    cost          wherever all who wait (this request, and the streams that it holds up) wait less, by measured passes

>>> policy = make_policy("dynamo,max_local_tokens=1000")
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.cluster.prefill_time import PrefillTime
from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker has to do."""

    num_queued: int = 0  # prompts that are not computed yet
    queued_tokens: int = 0  # of these prompts
    num_running: int = 0  # streams that decode

    def without(self, num_tokens: int) -> "WorkerLoad":
        """As it was before a prompt with so many new tokens was reserved there."""
        return WorkerLoad(self.num_queued - 1, self.queued_tokens - num_tokens, self.num_running)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may look at."""

    num_prompt_tokens: int
    num_cached_here: int  # prompt tokens whose KV the decode worker has
    here: WorkerLoad
    num_cached_there: int = 0
    there: WorkerLoad | None = None  # None: no prefill worker lives

    @property
    def num_new_here(self) -> int:
        return self.num_prompt_tokens - self.num_cached_here

    @property
    def num_new_there(self) -> int:
        return self.num_prompt_tokens - self.num_cached_there


@dataclass(frozen=True, slots=True)
class Decision:
    remote: bool
    reason: str  # for the live page and the log


class Policy(Protocol):
    def decide(self, situation: Situation) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Local:
    def decide(self, situation: Situation) -> Decision:
        return Decision(False, "policy: always local")


@dataclass(frozen=True, slots=True)
class Remote:
    def decide(self, situation: Situation) -> Decision:
        return Decision(situation.there is not None, "policy: always remote")


@dataclass(frozen=True, slots=True)
class DynamoQueue:
    max_local_prefill_length: int = 1000
    max_prefill_queue_size: int = 2

    def decide(self, situation: Situation) -> Decision:
        there = situation.there
        if there is None or situation.num_new_here <= self.max_local_prefill_length:
            return Decision(False, f"{situation.num_new_here} new tokens")
        if there.num_queued >= self.max_prefill_queue_size:
            return Decision(False, f"{there.num_queued} prompts queue there")
        return Decision(True, f"{situation.num_new_here} new tokens")


@dataclass(frozen=True, slots=True)
class Dynamo:
    max_local_tokens: int = 2048
    max_local_share: float = 0.7
    max_queued_tokens: int = 16_384  # a prefill worker with more to do is busy; Dynamo has no default for it

    def decide(self, situation: Situation) -> Decision:
        there, new = situation.there, situation.num_new_here
        if there is None or there.queued_tokens > self.max_queued_tokens:
            return Decision(False, "the prefill worker is busy")
        share = new / situation.num_prompt_tokens
        few = new < self.max_local_tokens and share < self.max_local_share
        return Decision(not few, f"{new} new tokens, {share:.0%} of the prompt")


@dataclass(frozen=True, slots=True)
class Threshold:
    max_local_tokens: int = 512

    def decide(self, situation: Situation) -> Decision:
        new = situation.num_new_here
        return Decision(situation.there is not None and new > self.max_local_tokens, f"{new} new tokens")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of waiting, added up over this request (until its first token) and the streams that it holds up."""

    here: PrefillTime
    there: PrefillTime
    stream_weight: float = 1.0  # what a second of a running stream counts beside one before a first token

    def decide(self, situation: Situation) -> Decision:
        if situation.there is None:
            return Decision(False, "no prefill worker")
        local_s, remote_s = self.local_s(situation), self.remote_s(situation, situation.there)
        return Decision(remote_s < local_s, f"{1e3 * local_s:.1f} ms here, {1e3 * remote_s:.1f} ms there")

    def local_s(self, situation: Situation) -> float:
        return self._waiting_s(self.here, situation.num_new_here, situation.num_cached_here, situation.here)

    def remote_s(self, situation: Situation, there: WorkerLoad) -> float:
        """The queue there, the prompt there, its blocks over the link, and the rows that are left to compute here."""
        block_size = self.here.spec.block_size
        num_left = (situation.num_prompt_tokens - 1) % block_size + 1  # the last one is always computed here
        num_moved = max(0, situation.num_prompt_tokens - num_left - situation.num_cached_here)
        new_there = max(0, situation.num_new_there - num_left)
        there_s = self._waiting_s(self.there, new_there, situation.num_cached_there, there)
        # The rows that are left do not queue: the engine takes the shortest prompts first.
        streams = WorkerLoad(num_running=situation.here.num_running)
        last_s = self._waiting_s(self.here, num_left, situation.num_prompt_tokens - num_left, streams)
        # Blocks travel while the next pass computes: what is left at its end is the last chunk, and what the link had
        # no time for.
        chunk = min(new_there, self.there.chunk_rows(there.num_running))
        computing_s = self.there.prompt_s(new_there - chunk, situation.num_cached_there, there.num_running).seconds
        left_s = self.here.spec.transfer_left_s(num_moved, min(num_moved, chunk), computing_s)
        return there_s + left_s + last_s

    def _waiting_s(self, time: PrefillTime, num_tokens: int, num_cached: int, load: WorkerLoad) -> float:
        queue_s = time.prompt_s(load.queued_tokens, 0, load.num_running).seconds
        prompt = time.prompt_s(num_tokens, num_cached, load.num_running)
        return queue_s + prompt.seconds + self.stream_weight * load.num_running * prompt.delay_s


POLICIES: dict[str, Callable[..., Policy]] = {
    "local": Local,
    "remote": Remote,
    "dynamo": Dynamo,
    "dynamo-queue": DynamoQueue,
    "threshold": Threshold,
    "cost": Cost,
}
DEFAULT_POLICY = "cost"


def make_policy(text: str, here: PrefillTime | None = None, there: PrefillTime | None = None) -> Policy:
    """From `name,option=value,...`. `cost` needs the measured times of both kinds of workers."""
    name, options = parse_choice("policy", text, tuple(POLICIES))
    given: dict[str, Any] = {}
    if name == "cost":
        if here is None or there is None:
            raise InvalidOptionError("policy cost needs a measured pass cost: paceline bench curve --out FILE")
        given = {"here": here, "there": there}
    policy: Policy = build_choice("policy", POLICIES[name], name, options, given)
    return policy


def parse_choice(what: str, text: str, names: tuple[str, ...]) -> tuple[str, dict[str, float]]:
    """`name,option=value,...` as a known name and numbers."""
    name, *pairs = text.split(",")
    if name not in names:
        raise InvalidOptionError(f"there is no {what} {name!r}: choose one of {', '.join(names)}")
    options: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            raise InvalidOptionError(f"{what} {name}: expected option=number, got {pair!r}") from None
    return name, options


def build_choice(what: str, kind: Any, name: str, options: dict[str, float], given: dict[str, Any]) -> Any:
    known = {field.name: field.type for field in dataclasses.fields(kind) if field.init} if options else {}
    for key, value in options.items():
        if key not in known or key in given:
            listed = ", ".join(key for key in known if key not in given) or "none"
            raise InvalidOptionError(f"{what} {name} has no option {key!r}: it has {listed}")
        given[key] = int(value) if known[key] in (int, "int") else value
    return kind(**given)
