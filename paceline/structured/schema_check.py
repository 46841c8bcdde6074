"""What a schema's compiler does not look for: references that go round, answers without an end, very large enums."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.option_values import shown
from paceline.errors import InvalidRequestError
from paceline.structured.limits import GrammarLimits

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def check_schema(schema: Any, limits: GrammarLimits) -> None:
    """Raise where the schema cannot be used, and say why."""
    if schema is False:
        raise InvalidRequestError("the JSON schema is `false`: no answer could match it")
    _check_enums(schema, limits)
    _check_references(schema)
    if not _Finite(schema).everywhere():
        raise InvalidRequestError(
            "the JSON schema asks for recursion without end: every answer would contain another one of its kind. "
            "Make the recursive property optional, or give it an anyOf with null"
        )


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object inside, the schema itself first."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _check_enums(schema: Any, limits: GrammarLimits) -> None:
    total = sum(len(part["enum"]) for part in _parts(schema) if isinstance(part.get("enum"), list))
    if total > limits.max_enum_values:
        raise InvalidRequestError(
            f"the JSON schema's enum values are {total} together; the limit is {limits.max_enum_values}. "
            "Use a pattern, or fewer values"
        )


def _check_references(schema: Any) -> None:
    """A chain of `$ref` that comes back to itself says nothing about the answer."""
    for part in _parts(schema):
        seen: set[str] = set()
        one: Any = part
        while isinstance(one, Mapping) and isinstance(one.get("$ref"), str):
            reference = one["$ref"]
            if reference in seen:
                raise InvalidRequestError(f"the JSON schema's $ref {shown(reference)} leads back to itself")
            seen.add(reference)
            one = find(schema, reference)


def find(schema: Any, reference: str) -> Any:
    """What a `$ref` inside the schema points to; None where it points nowhere or elsewhere (its compiler says so)."""
    if not reference.startswith("#"):
        return None
    found = schema
    for key in reference[1:].split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


class _Finite:
    """Which schemas have a finite answer: the least set closed under the rules of `_has_answer`.

    Starting with no reference known to have one, whatever can be concluded is added until nothing is new."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: set[str] = set()  # references
        self._references = {
            part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str) and part["$ref"][:1] == "#"
        }

    def everywhere(self) -> bool:
        while new := {ref for ref in self._references - self._known if self._has_answer(find(self._schema, ref))}:
            self._known |= new
        return self._has_answer(self._schema)

    def _has_answer(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if "enum" in schema or "const" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._references and reference not in self._known:
            return False
        for name, rule in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            branches = schema.get(name)
            if isinstance(branches, list) and branches and not rule(self._has_answer(one) for one in branches):
                return False
        kinds = schema.get("type", ())
        kinds = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
        if kinds & _SCALARS:
            return True
        looks_like_object = "object" in kinds or (not kinds and "required" in schema)
        looks_like_array = "array" in kinds or (not kinds and "minItems" in schema)
        if not looks_like_object and not looks_like_array:
            return True
        return (looks_like_object and self._object_ends(schema)) or (looks_like_array and self._array_ends(schema))

    def _object_ends(self, schema: Mapping[str, Any]) -> bool:
        required, properties = schema.get("required"), schema.get("properties")
        if not isinstance(required, list) or not isinstance(properties, Mapping):
            return True
        return all(self._has_answer(properties[name]) for name in required if name in properties)

    def _array_ends(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return True
        first = schema.get("prefixItems")
        items = first[:least] if isinstance(first, list) else []
        if len(items) < least and "items" in schema:
            items = [*items, schema["items"]]
        return all(self._has_answer(one) for one in items)
