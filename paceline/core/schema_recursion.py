"""Whether an answer to a JSON schema can end: references that lead back to themselves, and recursion without a way out.

    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}     has no finite answer
    {"type": "object", "properties": {"next": {"$ref": "#"}}}                           has one: {}

Compilers of grammars do not look for it: with such a schema a model would write until something cuts it off. What is
otherwise wrong with a schema (names that cannot be hashed, references to nowhere) is for them to say.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.option_values import shown
from paceline.errors import InvalidRequestError

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
# Looks at a part of the schema, for each part that there is. A choice: schemas of programs need one or two; one that
# needs more was made to keep us busy.
MAX_LOOKS = 20


def parts_of(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object inside, the schema itself first."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def check_recursion(schema: Any) -> None:
    """Raise where no answer can end, and say why."""
    parts = list(parts_of(schema))
    references = [part["$ref"] for part in parts if isinstance(part.get("$ref"), str)]
    targets = {reference: find(schema, reference) for reference in references}
    _check_chains(targets)
    if targets and not _Finite(schema, targets, MAX_LOOKS * len(parts)).everywhere():
        raise InvalidRequestError(
            "the JSON schema asks for recursion without end: every answer would contain another one of its kind. "
            "Make the recursive property optional, or give it an anyOf with null"
        )


def _check_chains(targets: Mapping[str, Any]) -> None:
    """A chain of `$ref` that comes back to itself says nothing about the answer."""
    done: set[str] = set()  # lead somewhere
    for first in targets:
        chain: dict[str, None] = {}
        reference: Any = first
        while isinstance(reference, str) and reference in targets and reference not in done:
            if reference in chain:
                raise InvalidRequestError(f"the JSON schema's $ref {shown(reference)} leads back to itself")
            chain[reference] = None
            target = targets[reference]
            reference = target.get("$ref") if isinstance(target, Mapping) else None
        done.update(chain)


def find(schema: Any, reference: str) -> Any:
    """What a `$ref` points to; None where that is nowhere, or elsewhere."""
    start, *keys = reference.split("/")
    if start != "#":
        return None
    found = schema
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


class _Finite:
    """Which references lead to a finite answer: the least set that is closed under the rules of `_has_answer`.

    Each is looked at once, and once more whenever one that it waited for is found to have an answer."""

    def __init__(self, schema: Any, targets: Mapping[str, Any], max_looks: int) -> None:
        self._schema = schema
        self._targets = targets
        self._known: set[str] = set()
        self._waiting: dict[str, list[str]] = {}  # for this reference: these
        self._looks_left = max_looks

    def everywhere(self) -> bool:
        todo = list(self._targets)
        while todo:
            reference = todo.pop()
            if reference not in self._known and self._has_answer(self._targets[reference], reference):
                self._known.add(reference)
                todo += self._waiting.pop(reference, ())
        return self._has_answer(self._schema, "")

    def _has_answer(self, schema: Any, of: str) -> bool:
        """`of`: the reference that it belongs to, which is looked at again where this has to wait."""
        self._looks_left -= 1
        if self._looks_left < 0:
            raise InvalidRequestError("the JSON schema's references depend too much on one another to be checked")
        if not isinstance(schema, Mapping):
            return schema is not False
        if "enum" in schema or "const" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._targets and reference not in self._known:
            self._waiting.setdefault(reference, []).append(of)
            return False
        for name, rule in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            branches = schema.get(name)
            if isinstance(branches, list) and branches and not rule(self._has_answer(one, of) for one in branches):
                return False
        return self._a_type_ends(schema, of)

    def _a_type_ends(self, schema: Mapping[str, Any], of: str) -> bool:
        given = schema.get("type")
        kinds = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
        if kinds & _SCALARS:
            return True
        looks_like_object = "object" in kinds or (not kinds and "required" in schema)
        looks_like_array = "array" in kinds or (not kinds and "minItems" in schema)
        if not looks_like_object and not looks_like_array:
            return True
        return (looks_like_object and self._object_ends(schema, of)) or (
            looks_like_array and self._array_ends(schema, of)
        )

    def _object_ends(self, schema: Mapping[str, Any], of: str) -> bool:
        required, properties = schema.get("required"), schema.get("properties")
        if not isinstance(required, list) or not isinstance(properties, Mapping):
            return True
        names = [name for name in required if isinstance(name, str) and name in properties]
        return all(self._has_answer(properties[name], of) for name in names)

    def _array_ends(self, schema: Mapping[str, Any], of: str) -> bool:
        least = schema.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return True
        first = schema.get("prefixItems")
        items = first[:least] if isinstance(first, list) else []
        if len(items) < least and "items" in schema:
            items = [*items, schema["items"]]
        return all(self._has_answer(one, of) for one in items)
