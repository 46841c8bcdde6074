"""Made-up schemas, tools and grammars through the server to the real engine: good and bad ones, none is answered with a
server error, as a whole or in a stream."""

import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.serve.generate.test_serve_structured import MESSAGES, server
from tests.serve.generate.test_serve_structured import PATTERNS as ENDLESS_PATTERNS

__all__ = ["server"]  # the fixture

KINDS = ["string", "number", "integer", "boolean", "null", "object", "array"]
JUNK = [None, True, 0, -1, 1.5, 10**30, "", "#", "\x00", "💥", [], {}, [1], {"a": 1}, "(", "a{99999}", 1e308]
TEXTS = {
    "$ref": ["#", "#/$defs/a", "#/properties/a", "#a", "http://x", "#/anyOf/0"],
    "pattern": ["^a+$", "[0-9]{1,5}", "(a|b)*", "(?=a)", "(a{1,100}){1,100}", "(a?){1000}a{1000}", r"\p{L}+", "["],
    "format": ["date", "email", "uuid", "moon"],
    "type": KINDS,
}
NUMBERS = ("minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "multipleOf")
INNER = ("items", "not", "if", "additionalProperties", "propertyNames", "contains")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
KEYS = ("properties", "required", "enum", "$defs", "x-guidance", *TEXTS, *NUMBERS, *INNER, *LISTS)
GRAMMARS = (
    'start: "a" B\nB: /[0-9]+/', 'start: start "a"', 'start: (("a"*)*)*', "start: <[3]> x\nx: <[99999999]>",
    'root ::= "a" b\nb ::= [0-9]+ | "(" b ")"', 'start: "a"{1,100000}', "start: @other",
    '%llguidance {"x": 1}\nstart: "a"',
)  # fmt: skip


class Maker:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def request(self) -> tuple[str, dict[str, Any]]:
        make: Callable[[], tuple[str, dict[str, Any]]] = self._rng.choice([self._chat, self._chat, self._response])
        path, body = make()
        return path, body | {"stream": self._rng.random() < 0.3, "temperature": self._rng.choice([0, 1]), "seed": 1}

    def _chat(self) -> tuple[str, dict[str, Any]]:
        pick, rng = self._rng.choice, self._rng
        body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": pick([1, 6])}
        schema = self._root()
        formats: list[dict[str, Any]] = [
            {},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {"guided_json": schema},
            {"structured_outputs": {"grammar": pick(GRAMMARS)}},
            {"structured_outputs": {"regex": pick(TEXTS["pattern"])}},
            {"structured_outputs": {"structural_tag": {"format": pick([{"type": "json_schema", "json_schema": schema},
                                                                       *JUNK])}}},
        ]  # fmt: skip
        body |= pick(formats)
        if rng.random() < 0.5:
            tools = [{"type": "function", "function": one} for one in self._functions()]
            body |= {"tools": tools, "tool_choice": pick(["auto", "required", "none"]), "n": pick([1, 2])}
        return "/v1/chat/completions", body

    def _response(self) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"input": "Weather in Oslo?", "max_output_tokens": 6}
        if self._rng.random() < 0.5:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": self._root()}}
        if self._rng.random() < 0.5:
            body["tools"] = [{"type": "function", **one} for one in self._functions()]
            body["tool_choice"] = self._rng.choice(["auto", "required", "none", {"type": "function", "name": "f"}])
        return "/v1/responses", body

    def _functions(self) -> list[dict[str, Any]]:
        names = self._rng.sample(["f", "g", "h-1"], self._rng.randint(1, 2))
        return [
            {"name": name, "parameters": {"type": "object"} | self._root(), "strict": self._rng.choice([True, None])}
            for name in names
        ]

    def _root(self) -> dict[str, Any]:
        if self._rng.random() < 0.03:
            return ENDLESS_PATTERNS
        properties = {"a": self._schema(2), "b": self._schema(1)}
        return {"type": "object", "properties": properties, "required": ["a"], "$defs": {"a": self._schema(1)}}

    def _schema(self, depth: int) -> Any:
        if depth == 0:
            return self._rng.choice([{}, True, False, {"type": self._rng.choice(KINDS)}])
        keys = self._rng.sample(KEYS, self._rng.choice([1, 2, 2, 3]))
        return {key: self._value(key, depth - 1) for key in keys}

    def _value(self, key: str, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.1 or key == "x-guidance":
            return rng.choice(JUNK)
        if key in TEXTS:
            return rng.choice(TEXTS[key])
        if key in NUMBERS:
            return rng.choice([0, 1, 5, -3, 1.5, 1_000_000])
        if key in INNER:
            return self._schema(depth)
        if key in LISTS:
            return [self._schema(depth) for _ in range(rng.randint(1, 3))]
        if key == "required":
            return rng.sample("abcd", rng.randint(0, 3))
        if key == "enum":
            return rng.sample(JUNK, rng.randint(1, 3))
        return {name: self._schema(depth) for name in rng.sample('ab"é', rng.randint(0, 3))}


@pytest.mark.parametrize(("seed", "count"), [(1, 40), pytest.param(2, 600, marks=pytest.mark.slow)])
def test_no_made_up_request_is_answered_with_a_server_error(http: httpx.Client, seed: int, count: int) -> None:
    maker = Maker(seed)
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, body = maker.request()
        answer = http.post(path, json=body, timeout=120)
        assert answer.status_code in (200, 400), (answer.text, body)
        assert '"server_error"' not in answer.text, (answer.text, body)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    assert min(statuses[200], statuses[400]) > count // 10, "both good and bad ones are made"
