"""What a schema's compiler does not look for: answers without an end, very large enums."""

from typing import Any

from paceline.core.schema_recursion import check_recursion, parts_of
from paceline.errors import InvalidRequestError
from paceline.structured.limits import GrammarLimits


def check_schema(schema: Any, limits: GrammarLimits) -> None:
    """Raise where the schema cannot be used, and say why."""
    if schema is False:
        raise InvalidRequestError("the JSON schema is `false`: no answer could match it")
    num_values = sum(len(part["enum"]) for part in parts_of(schema) if isinstance(part.get("enum"), list))
    if num_values > limits.max_enum_values:
        raise InvalidRequestError(
            f"the JSON schema's enum values are {num_values} together; the limit is {limits.max_enum_values}. "
            "Use a pattern, or fewer values"
        )
    check_recursion(schema)
