"""`response_format`, `structured_outputs` and `guided_*`: each reaches the engine as vLLM's constraint."""

import json
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Running
from tests.serve.generate.test_chat_tools import CHAT, CLOCK, WEATHER

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}

FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json", SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_object", True),
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    ({"response_format": TAG}, "structural_tag", TAG),
    ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
    ({"structured_outputs": {"regex": "[ab]+"}}, "regex", "[ab]+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
    ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, "json_object", True),
    ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, "json", SCHEMA),
    ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
    ({"guided_grammar": "start: A"}, "grammar", "start: A"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(("fields", "kind", "value"), FIELDS, ids=lambda x: x if isinstance(x, str) else None)
def test_each_field_becomes_the_engines_constraint(
    server: Running, http: httpx.Client, path: str, fields: dict[str, Any], kind: str, value: Any
) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    http.post(path, json=asked | fields | {"max_tokens": 2}).raise_for_status()
    found = server.backend.params[-1].structured_outputs
    assert found is not None and found.kind == kind
    given = getattr(found, kind)
    assert (json.loads(given) if kind in ("json", "structural_tag") else given) == value


def test_a_schema_with_thousands_of_properties_is_taken(server: Running, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(2000)}}
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "guided_json": schema}).raise_for_status()
    held = server.backend.params[-1].structured_outputs
    assert held is not None and json.loads(str(held.json)) == schema


@pytest.mark.parametrize("depth", [60, 200, 400])
def test_a_schema_that_is_nested_too_deeply_is_refused(http: httpx.Client, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for fields in ({"guided_json": schema}, {"tools": tools}, {"tools": tools, "tool_choice": "required"}):
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]} | fields)
        assert answer.status_code == 400 and "nested" in answer.json()["error"]["message"]
    text = json.dumps(schema)
    answer = http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "guided_json": text})
    assert answer.status_code < 500


def test_text_is_no_constraint(server: Running, http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 2, "response_format": {"type": "text"}}
    http.post("/v1/completions", json=body).raise_for_status()
    assert server.backend.params[-1].structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: field required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format", "letters"),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"schema": 3}}}, "response_format",
         "got 3"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "unknown field"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": ""}, "guided_regex", "non-empty"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "both"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "both"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ],
)  # fmt: skip
def test_wrong_formats_are_refused_by_name(http: httpx.Client, fields: Any, param: str, words: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x"} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error


STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


@pytest.mark.parametrize(
    ("options", "is_held"),
    [
        ({"tools": [WEATHER]}, False),
        ({"tools": [WEATHER], "tool_choice": "auto"}, False),
        ({"tools": [WEATHER], "tool_choice": "none"}, False),
        ({"tools": [STRICT]}, True),
        ({"tools": [WEATHER], "tool_choice": "required"}, True),
        ({"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, True),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, True),
    ],
)
def test_a_grammar_holds_strict_and_required_calls(
    server: Running, http: httpx.Client, options: Any, is_held: bool
) -> None:
    http.post(
        CHAT, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **options}
    ).raise_for_status()
    found = server.backend.params[-1].structured_outputs
    assert (found is not None) == is_held
    if isinstance(options.get("tool_choice"), dict):
        assert found is not None and found.grammar is not None
        assert '\\"clock\\"' in found.grammar and "get_weather" not in found.grammar
