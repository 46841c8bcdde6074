"""What is asked of a cluster: requests with arrival times, lengths and the prefixes that they share.

Two forms, both one JSON object per line; the first line tells which:

    {"arrival_s": 0.5, "num_prompt_tokens": 700, "num_output_tokens": 64, "block_ids": [1, 2, 7]}     ours
    {"timestamp": 500, "input_length": 700, "output_length": 64, "hash_ids": [1, 2]}                  Mooncake's

`block_ids` name the prompt's blocks of `block_size` tokens (16 unless the first line says another); equal ids mean
equal tokens from the start of the prompt on. Mooncake's have 512 tokens and times in milliseconds. Without ids nothing
is shared.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidOptionError

MOONCAKE_BLOCK = 512
OWN_BLOCK = 16


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    keys: tuple[int, ...] = ()  # of its full blocks, the last token left out


@dataclass(frozen=True, slots=True)
class Trace:
    requests: Sequence[TraceRequest]  # by arrival
    block_size: int

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.requests) / self.duration_s if self.duration_s > 0 else math.inf

    def mean_lengths(self) -> tuple[float, float]:
        """Of prompts and of answers."""
        count = len(self.requests)
        prompts = sum(request.num_prompt_tokens for request in self.requests)
        return prompts / count, sum(request.num_output_tokens for request in self.requests) / count

    def faster(self, factor: float) -> "Trace":
        """The same requests, `factor` times as fast."""
        if not factor > 0 or not math.isfinite(factor):
            raise InvalidOptionError(f"a trace can be made faster by a factor above 0, got {factor}")
        requests = [
            TraceRequest(r.arrival_s / factor, r.num_prompt_tokens, r.num_output_tokens, r.keys) for r in self.requests
        ]
        return Trace(requests, self.block_size)


def load_trace(path: str | Path, limit: int | None = None) -> Trace:
    try:
        with open(path, encoding="utf-8") as file:
            return read_trace(itertools.islice(file, limit), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"the trace {path} cannot be read: {error}") from error


def read_trace(lines: Iterable[str], name: str = "trace") -> Trace:
    requests: list[TraceRequest] = []
    block_size = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("expected a JSON object")
            if not block_size:
                block_size = MOONCAKE_BLOCK if "timestamp" in entry else int(entry.get("block_size", OWN_BLOCK))
                if block_size < 1:
                    raise ValueError(f"block_size {block_size} is not above 0")
            requests.append(_request(entry, block_size))
        except KeyError as error:
            raise InvalidOptionError(f"{name}, line {number}: {error.args[0]!r} is missing ({_FORMS})") from None
        except (ValueError, TypeError) as error:
            raise InvalidOptionError(f"{name}, line {number}: {error} ({_FORMS})") from None
    if not requests:
        raise InvalidOptionError(f"{name} has no requests ({_FORMS})")
    return Trace(sorted(requests, key=lambda request: request.arrival_s), block_size)


_FORMS = (
    "a line has arrival_s, num_prompt_tokens, num_output_tokens and block_ids, "
    "or Mooncake's timestamp, input_length, output_length and hash_ids"
)


def _request(entry: dict[str, Any], block_size: int) -> TraceRequest:
    if "timestamp" in entry:
        arrival_s, ids = float(entry["timestamp"]) / 1e3, entry.get("hash_ids", [])
        num_prompt, num_output = _count(entry, "input_length"), _count(entry, "output_length")
    else:
        arrival_s, ids = float(entry["arrival_s"]), entry.get("block_ids", [])
        num_prompt, num_output = _count(entry, "num_prompt_tokens"), _count(entry, "num_output_tokens")
    if not math.isfinite(arrival_s) or arrival_s < 0:
        raise ValueError(f"{arrival_s} is not a time of arrival")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError("block ids are a list of whole numbers")
    if len(ids) > -(-num_prompt // block_size):
        raise ValueError(f"{len(ids)} block ids for {num_prompt} tokens in blocks of {block_size}")
    return TraceRequest(arrival_s, num_prompt, num_output, tuple(ids[: (num_prompt - 1) // block_size]))


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be a whole number above 0, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Poisson arrivals; lengths are log-normal around their means; prompts of one group begin alike."""

    requests: int = 1000
    rate: float = 1.0  # per second
    prompt: int = 512  # mean tokens, the shared beginning included
    output: int = 128
    spread: float = 0.5  # of the logarithm of lengths; 0: all alike
    groups: int = 0  # 0: nothing is shared
    prefix: int = 256  # tokens that the prompts of a group share
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or not self.rate > 0 or self.prompt < 1 or self.output < 1 or self.spread < 0:
            raise InvalidOptionError(f"a load needs requests, rate, prompt and output above 0, got {self}")

    @staticmethod
    def parse(text: str) -> "Synthetic":
        """From `requests=1000,rate=5,prompt=512`."""
        kinds = {field.name: float if field.type in (float, "float") else int for field in fields(Synthetic)}
        options: dict[str, Any] = {}
        for pair in filter(None, text.split(",")):
            key, _, value = pair.partition("=")
            if key not in kinds:
                raise InvalidOptionError(f"a load has no {key!r}: it has {', '.join(kinds)}")
            try:
                options[key] = kinds[key](value)
            except ValueError:
                raise InvalidOptionError(f"load: {key} must be a number, got {value!r}") from None
        return Synthetic(**options)

    def trace(self, block_size: int = OWN_BLOCK) -> Trace:
        dice = np.random.default_rng(self.seed)
        arrivals = np.cumsum(dice.exponential(1 / self.rate, self.requests)).tolist()
        prompts, outputs = self._lengths(dice, self.prompt), self._lengths(dice, self.output)
        groups = dice.integers(0, max(1, self.groups), self.requests).tolist()
        shared = self.prefix // block_size if self.groups else 0
        requests, fresh = [], itertools.count(max(1, self.groups) * shared)
        for arrival_s, prompt, output, group in zip(arrivals, prompts, outputs, groups, strict=True):
            num_blocks = (prompt - 1) // block_size
            common = min(shared, num_blocks)
            keys = [*range(group * shared, group * shared + common), *itertools.islice(fresh, num_blocks - common)]
            requests.append(TraceRequest(arrival_s, prompt, output, tuple(keys)))
        return Trace(requests, block_size)

    def _lengths(self, dice: np.random.Generator, mean: int) -> list[int]:
        lengths = dice.lognormal(math.log(mean) - self.spread**2 / 2, self.spread, self.requests)
        found: list[int] = np.maximum(1, np.rint(lengths)).astype(int).tolist()
        return found
