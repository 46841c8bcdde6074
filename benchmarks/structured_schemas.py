"""Our own JSON schemas, in rising difficulty: the features that people use, mixed more and more.

`schemas(count)` is always the same list. Every schema has answers, and short ones, so that a small model can finish."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

KEYS = (
    "id", "name", "city", "price", "title", "tags", "items", "owner", "status", "created", "address", "email", "count",
    "colour", "unit", "notes", "amount", "kind", "parts", "weight", "open", "rating", "lines", "origin", "target",
)  # fmt: skip
WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "north", "south", "draft", "final", "paid")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname")
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^[a-z]+(_[a-z]+){0,2}$", "^#[0-9a-f]{6}$", "^v[0-9]\\.[0-9]{1,2}$", "^[01]{8}$")


def schemas(count: int) -> list[tuple[int, Schema]]:
    """(level, schema), the level from 1 to 6."""
    return [(1 + 6 * i // count, schema(1 + 6 * i // count, random.Random(1000 + i))) for i in range(count)]


def schema(level: int, rng: random.Random) -> Schema:
    made = _object(level, rng, depth=0)
    if level >= 5 and rng.random() < 0.7:
        made["$defs"] = {"node": _object(1, rng, depth=2), "tree": _tree()}
        made["properties"]["ref"] = {"$ref": "#/$defs/" + rng.choice(("node", "tree"))}
        made["required"] = [*made["required"], "ref"]
    return made


def _tree() -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    properties = {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "children": children}
    return {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}


def _object(level: int, rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(KEYS, rng.randint(1, 2 + level // 2))
    properties = {key: _value(level, rng, depth + 1) for key in keys}
    required = keys if level <= 2 else [key for key in keys if rng.random() < 0.7]
    made: Schema = {"type": "object", "properties": properties, "required": required}
    made["additionalProperties"] = False
    if level >= 4 and rng.random() < 0.3:
        made["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return made


def _value(level: int, rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random], Schema]] = [_text, _integer, _boolean]
    if level >= 2:
        makers += [_enum, _const, _number]
    if level >= 3:
        makers += [_pattern, _format]
    deeper = depth < min(level, 3)
    kind = rng.random()
    if deeper and kind < 0.25:
        return _object(level - 1, rng, depth)
    if deeper and kind < 0.45:
        return _array(level, rng, depth)
    if level >= 4 and kind < 0.6:
        branches = [rng.choice(makers)(rng), {"type": "null"}]
        return {"anyOf": branches if rng.random() < 0.5 else [*branches, _boolean(rng)]}
    return rng.choice(makers)(rng)


def _array(level: int, rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if level >= 5 and rng.random() < 0.3:
        first = [_integer(rng), _text(rng)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2, "maxItems": 2}
    return {"type": "array", "items": _value(level - 1, rng, depth + 1), "minItems": least, "maxItems": least + 1}


def _text(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(4, 12)}


def _integer(rng: random.Random) -> Schema:
    low = rng.choice((0, 1, -10))
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((9, 99, 1000))}


def _number(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 50}
    return {"type": "number", "minimum": 0, "exclusiveMaximum": 100}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _enum(rng: random.Random) -> Schema:
    return {"enum": [*rng.sample(WORDS, rng.randint(2, 4)), *rng.choice(([], [None], [3]))]}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice((*WORDS, 7, True))}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def large_schema(num_properties: int) -> Schema:
    """As generated from a large API: flat, every second property required."""
    kinds = ("string", "integer", "boolean")
    keys = [f"property_{i}" for i in range(num_properties)]
    properties = {key: {"type": kinds[i % 3], "description": f"number {i}"} for i, key in enumerate(keys)}
    return {"type": "object", "properties": properties, "required": keys[::2], "additionalProperties": False}
