"""A request's own say in how it is drafted for: `SamplingParams(speculative={...})`.

{"off": True}                       plain decoding
{"method": "suffix"}                another method than the engine's
{"num_speculative_tokens": 8}       longest path
{"node_budget": 16}                 largest tree
{"prediction": "the expected text"} what the client expects, for `prediction`
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.spec.config.method import MAX_DRAFT_DEPTH, MAX_DRAFT_NODES
from paceline.spec.config.options import refuse_unknown
from paceline.spec.config.speculative_config import SpeculativeConfig, method_row

KEYS = ("off", "method", "num_speculative_tokens", "node_budget", "prediction")


@dataclass(frozen=True, slots=True)
class Choice:
    method: str
    num_speculative_tokens: int
    node_budget: int


PLAIN = Choice("none", 0, 0)


def choose(engine: SpeculativeConfig | None, given: Mapping[str, Any] | None) -> Choice:
    """The engine's configuration overlaid with what the request asked for; raises `InvalidOptionError`."""
    if given is None:
        return PLAIN if engine is None else _from_config(engine)
    if not isinstance(given, Mapping):
        raise InvalidOptionError(
            f"SamplingParams.speculative must be a dictionary such as {{'off': True}}, got {given!r}"
        )
    refuse_unknown(given, KEYS, "SamplingParams.speculative")
    if not isinstance(given.get("off", False), bool):
        raise InvalidOptionError(f"speculative 'off' must be True or False, got {given['off']!r}")
    if given.get("off", False):
        return PLAIN
    method = _method(engine, given)
    base = engine if engine is not None and engine.method == method else None
    config = base if base is not None else SpeculativeConfig.parse({"method": method})
    assert config is not None
    return _resize(_from_config(config), given, limited=base is not None and not method_row(method).per_request)


def _method(engine: SpeculativeConfig | None, given: Mapping[str, Any]) -> str:
    default = "none" if engine is None else engine.method
    method = given.get("method")
    if method is None:
        return "prediction" if "prediction" in given and not _takes_prediction(engine) else default
    if not isinstance(method, str):
        raise InvalidOptionError(f"speculative 'method' must be a name, got {method!r}")
    row = method_row(method)
    if method != default and not row.per_request:
        raise InvalidOptionError(
            f"method {method!r} must be set up with the engine (speculative_config); this engine has {default!r}"
        )
    return method


def _takes_prediction(engine: SpeculativeConfig | None) -> bool:
    """The engine's own method already makes use of a prediction, as a member."""
    if engine is None:
        return False
    if engine.method == "auto" and engine.options["members"] is None:
        return True
    members = engine.options.get("members") or ()
    return engine.method == "prediction" or any(member.method == "prediction" for member in members)


def _from_config(config: SpeculativeConfig) -> Choice:
    return Choice(config.method, config.num_speculative_tokens, config.node_budget)


def _resize(base: Choice, given: Mapping[str, Any], limited: bool) -> Choice:
    """`limited`: the engine reserved slots for its own size, so a request may only ask for less."""
    sizes = {}
    limits = {"num_speculative_tokens": MAX_DRAFT_DEPTH, "node_budget": MAX_DRAFT_NODES}
    for key, limit in limits.items():
        value, most = given.get(key), getattr(base, key) if limited else limit
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise InvalidOptionError(f"speculative {key!r} must be a whole number from 0 to {most} here, got {value!r}")
        sizes[key] = value
    depth = sizes.get("num_speculative_tokens", base.num_speculative_tokens)
    nodes = sizes.get("node_budget", base.node_budget if limited else max(base.node_budget, depth))
    return PLAIN if min(depth, nodes) == 0 else Choice(base.method, depth, nodes)
