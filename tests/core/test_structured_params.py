"""What an answer must look like is one thing, of plain values, and refused when the object is made."""

import dataclasses
import json
import math
from typing import Any

import pytest

from paceline import SamplingParams, StructuredOutputsParams
from paceline.core.structured import KINDS, MAX_CHARS, MAX_CHOICES
from paceline.errors import InvalidOptionError

EXAMPLES: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["yes", "no"],
    "grammar": 'start: "a"',
    "json_object": True,
    "structural_tag": {"structures": [], "triggers": []},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone_is_taken(kind: str) -> None:
    params = StructuredOutputsParams(**{kind: EXAMPLES[kind]})
    assert params.kind == kind
    assert SamplingParams(structured_outputs=params).structured_outputs == params
    assert dataclasses.replace(params) == params


@pytest.mark.parametrize("given", [{}, {"json_object": False}, {"regex": "a", "json": {}}, EXAMPLES])
def test_none_or_several_are_refused_with_the_names(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="exactly one of json, regex, choice"):
        StructuredOutputsParams(**given)


def test_a_dictionary_is_kept_as_text_so_that_nobody_can_change_it() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert isinstance(params.json, str)
    assert list(json.loads(params.json)["properties"]) == ["b", "a"]  # in the user's order
    assert json.loads(params.json)["type"] == "object"


def endless() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "given, said",
    [
        ({"json": "{"}, "is not JSON text"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": 5}, "must be a dictionary or JSON text"),
        ({"json": {"minimum": math.nan}}, "cannot be written as JSON"),
        ({"json": {"default": object()}}, "cannot be written as JSON"),
        ({"json": endless()}, "cannot be written as JSON"),
        ({"json": deep(100_000)}, "cannot be written as JSON"),
        ({"json": "[" * 100_000}, "is not JSON text"),
        ({"json": {"description": "x" * MAX_CHARS}}, f"the limit is {MAX_CHARS}"),
        ({"json": '"' + "x" * MAX_CHARS + '"'}, f"the limit is {MAX_CHARS}"),
        ({"regex": ""}, "must be non-empty text"),
        ({"regex": "x" * (MAX_CHARS + 1)}, f"the limit is {MAX_CHARS}"),
        ({"grammar": 5}, "must be non-empty text"),
        ({"choice": "yes"}, "must be a list of texts"),
        ({"choice": []}, "is empty"),
        ({"choice": ["a", ""]}, "non-empty text"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, f"the limit is {MAX_CHOICES}"),
        ({"json_object": 1}, "must be True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json and json_object, not for regex"),
        ({"regex": "a", "whitespace_pattern": " "}, "is for json and json_object, not for regex"),
        ({"json_object": True, "whitespace_pattern": ""}, "must be non-empty text"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "give disable_any_white"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_reason(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as refused:
        StructuredOutputsParams(**given)
    assert len(str(refused.value)) < 500


def test_anything_but_the_class_is_refused_in_sampling_params() -> None:
    with pytest.raises(InvalidOptionError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
