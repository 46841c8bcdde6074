"""Which schemas have an answer that ends; none takes long to judge."""

import time
from typing import Any

import pytest

from paceline.core.schema_recursion import check_recursion
from paceline.errors import InvalidRequestError


def objects(needs: dict[str, list[str]], first: str = "a") -> dict[str, Any]:
    """Objects by name, each of which requires these others."""
    defs = {
        name: {
            "type": "object",
            "properties": {other: {"$ref": f"#/$defs/{other}"} for other in others},
            "required": others,
        }
        for name, others in needs.items()
    }
    return {"$ref": f"#/$defs/{first}", "$defs": defs}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},  # impossible, which compilers say
        objects({"a": ["b", "c"], "b": ["c"], "c": []}),
        objects({"a": ["b"], "b": [], "c": ["c"]}),  # what is endless is not asked for
        {"$ref": "#anchor"},
        {"$ref": "#/nowhere"},
        {"$ref": "other.json"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": 5, "required": [{}], "properties": {"x": {"$ref": "#"}}}}},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "null"}]},
    ],
)
def test_what_can_end_is_taken(schema: dict[str, Any]) -> None:
    check_recursion(schema)


@pytest.mark.parametrize(
    "schema",
    [
        objects({"a": ["b"], "b": ["c"], "c": ["a"]}),
        objects({"a": ["b", "c"], "b": [], "c": ["a"]}),
        {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "required": ["x"]},
        {"type": "array", "minItems": 2, "prefixItems": [{}], "items": {"$ref": "#"}},
    ],
)
def test_what_cannot_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="recursion without end"):
        check_recursion(schema)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_long_chain_takes_time_in_proportion_to_its_length(backwards: bool) -> None:
    numbers = range(5000, -1, -1) if backwards else range(5001)
    begin_s = time.process_time()
    check_recursion(objects({str(i): [str(i + 1)] if i < 5000 else [] for i in numbers}, first="0"))
    assert time.process_time() - begin_s < 1.0


def test_what_would_take_very_long_to_judge_is_refused() -> None:
    """One object that waits for each of the others in turn, and looks at all of them each time."""
    names = [str(i) for i in range(3000)]
    defs = objects({**{name: [] for name in names}, "a": names})["$defs"]
    begin_s = time.process_time()
    with pytest.raises(InvalidRequestError, match="too much on one another"):
        check_recursion({"allOf": [{"$ref": "#/$defs/a"}], "$defs": defs})
    assert time.process_time() - begin_s < 1.0
