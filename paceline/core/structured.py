"""What an answer must look like: a JSON schema, any JSON object, a regular expression, a choice, a grammar, or tags.

>>> from paceline import SamplingParams, StructuredOutputsParams                                # doctest: +SKIP
>>> SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

The names are vLLM's. Only the shape is checked here; what the text of a schema or grammar means is found out when it is
compiled (`paceline/structured/`), before the request enters the engine.
"""

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.option_values import flag, shown, texts
from paceline.errors import InvalidOptionError

# A choice: the schema with 2,000 properties of benchmarks/structured.py has 0.1 million characters. At twice of it the
# slowest texts that still compile take twice as long, at half of it schemas generated from large APIs are refused.
MAX_CHARS: Final = 1_000_000
MAX_CHOICES: Final = 10_000  # the same: 10,000 short choices compile in some tenths of a second

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
JSON_KINDS: Final = ("json", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of the first six is set. Dictionaries are kept as JSON text: nobody can change them afterwards."""

    json: str | dict[str, Any] | None = None  # a JSON schema, as text or as a dictionary
    regex: str | None = None
    choice: list[str] | None = None  # kept as a tuple
    grammar: str | None = None  # Lark, or GBNF-like EBNF with a rule `root`
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False  # JSON without optional spaces and line breaks
    whitespace_pattern: str | None = None  # a regular expression for what may stand between the parts of JSON

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) is not None:
                self._set(name, flag(f"structured_outputs.{name}", getattr(self, name)))
        if self.json_object is False:
            self._set("json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidOptionError(
                f"structured_outputs takes exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none of them'}"
            )
        self._check_kind()
        self._check_whitespace()

    def _check_kind(self) -> None:
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                self._set(name, _json(f"structured_outputs.{name}", getattr(self, name)))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                self._set(name, _text(f"structured_outputs.{name}", getattr(self, name)))

    def _check_whitespace(self) -> None:
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) not in (None, False) and self.kind not in JSON_KINDS:
                raise InvalidOptionError(f"structured_outputs.{name} is for json and json_object, not for {self.kind}")
        if self.whitespace_pattern is not None:
            self._set("whitespace_pattern", _text("structured_outputs.whitespace_pattern", self.whitespace_pattern))
            if self.disable_any_whitespace:
                raise InvalidOptionError("structured_outputs: give disable_any_whitespace or whitespace_pattern")

    @property
    def kind(self) -> str:
        """Which of the six is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise InvalidOptionError(f"structured_outputs.choice must be a list of texts, got {shown(value)}")
    found = tuple(dict.fromkeys(texts("structured_outputs.choice", value)))
    if not found:
        raise InvalidOptionError("structured_outputs.choice is empty: give at least one text")
    if len(found) > MAX_CHOICES:
        raise InvalidOptionError(f"structured_outputs.choice has {len(found)} texts; the limit is {MAX_CHOICES}")
    _check_length("structured_outputs.choice", sum(map(len, found)))
    return found


def _json(name: str, value: Any) -> str:
    """JSON text of an object; a schema may also be `true`, which allows anything."""
    if not isinstance(value, str | Mapping):
        raise InvalidOptionError(f"{name} must be a dictionary or JSON text, got {shown(value)}")
    if isinstance(value, Mapping):
        try:
            text = json_text.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOptionError(f"{name} cannot be written as JSON: {error}") from error
        _check_length(name, len(text))
        return text
    _check_length(name, len(value))
    try:
        parsed = json_text.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidOptionError(f"{name} is not JSON text: {error}") from error
    if not isinstance(parsed, dict | bool):
        raise InvalidOptionError(f"{name} must be a JSON object, got {shown(parsed)}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidOptionError(f"{name} must be non-empty text, got {shown(value)}")
    _check_length(name, len(value))
    return value


def _check_length(name: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise InvalidOptionError(f"{name} has {num_chars} characters; the limit is {MAX_CHARS}")
