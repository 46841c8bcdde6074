"""From the bytes of a body to a checked request, at a cost that is bounded by the server's limits.

A megabyte of JSON can hold half a million values, and a validator can find a mistake in each. So what is read is looked
at in stages, each cheaper than what it protects: how many values there are, JSON, the size of its lists, the fields.
"""

import json
import re
from typing import Any, NoReturn, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError

from paceline.llm.worker import in_worker
from paceline.serve.http.errors import ApiError
from paceline.serve.http.request_bodies import Body
from paceline.serve.http.validation import explain

Model = TypeVar("Model", bound=Body)

# Beside token ids, nothing in a request comes in large numbers.
MAX_ITEMS = 4096
MAX_KEYS = 4096  # a JSON schema may have thousands of properties
MAX_DEPTH = 100  # a choice: schemas of large APIs have some 30 levels; what walks a schema takes a few frames for each
VALUES_BESIDE_TOKENS = 16_384
TEXTS_OF_TOKENS = 4  # full contexts that a body may hold as token ids: prompts, allowed tokens, a prediction

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)


class BodyReader:
    """Makes the dependencies by which routes get their bodies."""

    def __init__(self, max_model_len: int) -> None:
        self.max_values = VALUES_BESIDE_TOKENS + TEXTS_OF_TOKENS * max_model_len

    def dependency(self, model: type[Model]) -> Any:
        async def read(request: Request) -> Model:
            content_type = request.headers.get("content-type", "")
            if not _JSON_TYPE.fullmatch(content_type):
                raise ApiError(400, "the body must be one JSON object, sent as application/json", code="invalid_json")
            raw = await request.body()
            return await in_worker(len(raw), lambda: self.parse(raw, model))

        return Depends(read)

    def parse(self, raw: bytes, model: type[Model]) -> Model:
        data = self._json(raw)
        check_shape(data)
        try:
            return model.model_validate(data)
        except ValidationError as error:
            raise explain(error) from None

    def _json(self, raw: bytes) -> Any:
        try:
            text = raw.decode()
            self._check_number_of_values(text)
            data = json.loads(text, parse_constant=_no_number)
            if _SURROGATE.search(text):
                json.dumps(data, ensure_ascii=False).encode()  # JSON can spell half a pair; no tokenizer takes one
        except UnicodeEncodeError:
            message = "the body holds half of a surrogate pair: send valid Unicode"
            raise ApiError(400, message, code="invalid_unicode") from None
        except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
            message = f"the body is not JSON ({error}): send one JSON object"
            raise ApiError(400, message, code="invalid_json") from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
        return data

    def _check_number_of_values(self, text: str) -> None:
        """Before anything is made of them."""
        most = self.max_values
        if _num_separators(text) > most and (
            _num_strings(text) > most or _num_separators(_STRING.sub("", text)) > most
        ):
            raise ApiError(400, f"the body holds more than {most} values: send less in one call", code="too_long")


def _num_separators(text: str) -> int:
    """Values are separated by these, at the least; text may hold some too."""
    return text.count(",") + text.count("[") + text.count("{")


def _num_strings(text: str) -> int:
    return (text.count('"') - text.count('\\"')) // 2


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def check_shape(data: Any) -> None:
    """Refuse what no field could take, so that no validator has to find a mistake in each of its items."""
    if not isinstance(data, dict):
        return
    _check_keys(data, None)
    for field, value in data.items():
        _check_field(value, field)


def _check_field(field_value: Any, field: str) -> None:
    waiting = [(field_value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            message = f"{field} is nested more than {MAX_DEPTH} levels deep: flatten it"
            raise ApiError(400, message, code="too_deep", param=field)
        if isinstance(value, dict):
            _check_keys(value, field)
            waiting.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            kinds = set(map(type, value))
            if len(value) > MAX_ITEMS and kinds != {int}:
                message = f"a list has {len(value)} items; beside token ids at most {MAX_ITEMS} are taken"
                raise ApiError(400, message, code="too_long", param=field)
            if not kinds.isdisjoint((dict, list)):
                waiting.extend((item, depth + 1) for item in value)


def _check_keys(value: dict[str, Any], field: str | None) -> None:
    if len(value) > MAX_KEYS:
        message = f"an object has {len(value)} keys; at most {MAX_KEYS} are taken"
        raise ApiError(400, message, code="too_long", param=field)
