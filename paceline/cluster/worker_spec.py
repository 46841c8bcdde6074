"""What a kind of worker is and costs: its measured pass cost, its limits, its memory, its link and its price.

>>> spec = WorkerSpec("cpu", PassCost.of({1: 0.010, 8: 0.012, 64: 0.050}), num_kv_blocks=1000)
>>> spec.replace(tokens_per_pass=2.5).tokens_per_pass
2.5

A file of one is JSON: the fields by name, with `pass_cost` as `paceline bench curve` writes it. What `bench curve
--out` and `paceline doctor --json` write can be read as they are; all other fields then have their defaults.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.lab.pass_cost import PassCost

READS = "prompt"  # what a pass is that has rows of a prompt; others only decode
DECODES = "streams"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long a pass takes while a pass of another worker runs on the same host, by what the two do:
    passes that only decode wait for memory, those with rows of a prompt compute. Several neighbours add up."""

    streams_beside_streams: float = 1.0
    streams_beside_prompt: float = 1.0
    prompt_beside_streams: float = 1.0
    prompt_beside_prompt: float = 1.0

    def factor(self, own: str, others: Iterable[str]) -> float:
        return 1.0 + sum(float(getattr(self, f"{own}_beside_{other}")) - 1.0 for other in others)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    pass_cost: PassCost  # seconds of a step by its rows, what the engine does around the pass included
    stream_row_s: float = 0.0  # more for each row of a stream, where `pass_cost` is of prompts: logits, and a draw
    slowdown: Slowdown | None = None  # by the other workers of the fleet, on the same host; None: it is alone there
    context_s: float = 0.0  # more for each row, per 1000 tokens of its context
    stream_context_s: float = (
        0.0  # more than that for each stream: rows of one prompt share what they read, streams not
    )
    pass_spread: tuple[float, ...] = (1.0,)  # equally likely factors by which passes of the same rows differ
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # rows of one pass
    max_token_delay_s: float | None = 0.02  # that prompt rows may add to a pass in which others decode; None: any
    num_kv_blocks: int = 4096
    block_size: int = 16
    kv_bytes_per_token: int = 23_040  # SmolLM2-135M in bfloat16: 30 layers x 2 x 3 heads x 64 x 2 bytes
    bandwidth: float = 1e9  # bytes per second of its link, for KV blocks
    latency_s: float = 0.002  # of one request over that link
    tokens_per_pass: float = 1.0  # that a stream gets: above 1 with speculation
    rows_per_stream: int = 1  # of a decode pass: 1 and the draft's nodes
    request_s: float = 0.0  # from the server to the worker and back, once for each request
    dollars_per_hour: float = 0.0

    def __post_init__(self) -> None:
        counts = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_kv_blocks": self.num_kv_blocks,
            "block_size": self.block_size,
            "rows_per_stream": self.rows_per_stream,
        }
        for field, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise InvalidOptionError(f"worker {self.name!r}: {field} must be a whole number above 0, got {count!r}")
        if not self.pass_spread:
            raise InvalidOptionError(f"worker {self.name!r}: pass_spread must have one factor or more")
        for factor in self.pass_spread:
            _check_number(self.name, "a factor of pass_spread", factor, least=1e-3)
        for name, slower in dataclasses.asdict(self.slowdown).items() if self.slowdown is not None else ():
            _check_number(self.name, f"slowdown: {name}", slower, least=1.0)
        _check_number(self.name, "stream_row_s", self.stream_row_s, least=0.0)
        _check_number(self.name, "context_s", self.context_s, least=0.0)
        _check_number(self.name, "stream_context_s", self.stream_context_s, least=0.0)
        _check_number(self.name, "latency_s", self.latency_s, least=0.0)
        _check_number(self.name, "request_s", self.request_s, least=0.0)
        _check_number(self.name, "dollars_per_hour", self.dollars_per_hour, least=0.0)
        _check_number(self.name, "kv_bytes_per_token", self.kv_bytes_per_token, least=0.0)
        _check_number(self.name, "tokens_per_pass", self.tokens_per_pass, least=1.0)
        _check_number(self.name, "bandwidth", self.bandwidth, least=1.0)
        if self.max_token_delay_s is not None:
            _check_number(self.name, "max_token_delay_s", self.max_token_delay_s, least=0.0)

    def replace(self, **changes: Any) -> "WorkerSpec":
        return dataclasses.replace(self, **changes)

    def transfer_s(self, num_tokens: float) -> float:
        """Seconds until so many tokens' KV came over the link."""
        return self.latency_s + num_tokens * self.kv_bytes_per_token / self.bandwidth

    def transfer_left_s(self, num_tokens: float, num_last: float, computing_s: float) -> float:
        """Of a transfer that began `computing_s` before the prompt was whole; its last pass gave `num_last` tokens."""
        if not num_tokens:
            return 0.0
        return max(self.transfer_s(num_last), self.transfer_s(num_tokens) - computing_s)

    @staticmethod
    def load(path: str | Path) -> "WorkerSpec":
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidOptionError(f"{path} is not a worker file: {error}") from error
        if not isinstance(data, dict):
            raise InvalidOptionError(f"{path} is not a worker file: expected a JSON object, got {type(data).__name__}")
        known = {field.name for field in dataclasses.fields(WorkerSpec)} - {"pass_cost"}
        options = {key: value for key, value in data.items() if key in known}
        options.setdefault("name", Path(path).stem)
        if isinstance(options.get("pass_spread"), list):
            options["pass_spread"] = tuple(options["pass_spread"])
        try:
            if data.get("slowdown") is not None:
                options["slowdown"] = _slowdown(options["name"], data["slowdown"])
            return WorkerSpec(pass_cost=_curve(data), **options)
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{path}: {error}") from error


def _check_number(name: str, field: str, value: Any, least: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise InvalidOptionError(f"worker {name!r}: {field} must be a number of at least {least:g}, got {value!r}")


def _slowdown(name: str, data: Any) -> Slowdown:
    known = [field.name for field in dataclasses.fields(Slowdown)]
    if not isinstance(data, dict) or not data.keys() <= set(known):
        raise InvalidOptionError(f"worker {name!r}: slowdown is an object of {', '.join(known)}, got {data!r}")
    return Slowdown(**data)


def _curve(data: dict[str, Any]) -> PassCost:
    """The pass cost in any of the forms that our own commands write."""
    try:
        if "passes" in data.get("model", {}):  # paceline doctor --json
            curve = {entry["rows"]: entry["median_s"] for entry in data["model"]["passes"]}
        else:
            curve = data.get("pass_cost", data)
        return PassCost.of({int(rows): float(seconds) for rows, seconds in curve.items()})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise InvalidOptionError(
            'no pass cost: expected "pass_cost": {"1": 0.010, "8": 0.012}, as `paceline bench curve` writes it'
        ) from error
