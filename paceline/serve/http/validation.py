"""What is wrong with a body, said the way OpenAI says it: one message, the field's name, status 400."""

import difflib
import reprlib
from typing import Any

from pydantic import ValidationError

from paceline.serve.http.errors import ApiError
from paceline.serve.http.request_bodies import ChatCompletionRequest, CompletionRequest

_KNOWN_FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})


def explain(error: ValidationError) -> ApiError:
    problems: list[Any] = error.errors(include_url=False)
    first = problems[0]
    # A union reports a problem for each form it could have had: the deepest one is of the form that was meant.
    first = max((problem for problem in problems if problem["loc"][:1] == first["loc"][:1]), key=_depth)
    path = [str(part) for part in first["loc"] if _is_field(part)]
    field = path[0] if path else None
    if first["type"] == "extra_forbidden":
        return _unknown_field(path)
    if not path:
        return ApiError(400, "the body must be one JSON object, sent as application/json", code="invalid_json")
    message = f"{'.'.join(path)}: {_sentence(first)}"
    if first["type"] not in ("missing", "value_error"):  # a value error of ours says what it got
        message += f", got {_short(first['input'])}"
    return ApiError(400, message, code=first["type"], param=field)


def _depth(problem: dict[str, Any]) -> int:
    return len(problem["loc"])


def _is_field(part: int | str) -> bool:
    """Beside fields and indices, a path names the forms of a union: "str", "list[TextPart]"."""
    return isinstance(part, int) or (part not in ("str", "int", "NamedTool") and "[" not in part)


def _unknown_field(path: list[str]) -> ApiError:
    name = path[-1]
    near = difflib.get_close_matches(name, _KNOWN_FIELDS, n=1) if len(path) == 1 else []
    hint = f" Did you mean {near[0]!r}?" if near else " See /docs for the fields this server knows."
    return ApiError(400, f"unknown field {'.'.join(path)!r}.{hint}", code="unknown_parameter", param=path[0])


def _sentence(problem: dict[str, Any]) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _short(value: Any) -> str:
    text = reprlib.repr(value)  # looks at the beginning only
    return text if len(text) <= 80 else text[:77] + "..."
