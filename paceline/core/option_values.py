"""What a caller gave for an option, turned into plain Python values or refused with a message that says why.

Options come from anywhere: JSON, numpy, a user's own classes. The engine works with `int`, `float`, `bool`, `str`,
tuples and dictionaries only, and with nothing that its owner could still change while the request runs.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from paceline.errors import InvalidOptionError

_SHOWN_CHARS = 100


def shown(value: object) -> str:
    """A value for an error message: short however long the value is, and never an error itself."""
    try:
        text = reprlib.repr(value)
    except Exception:  # such as Python's limit on the digits of a number, or a repr of the caller's own that fails
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def real(name: str, value: Any, low: float, high: float, meaning: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidOptionError(f"{name} must be a number, {meaning}, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # NaN fails every comparison
        raise InvalidOptionError(f"{name} must be {meaning}, got {shown(value)}")
    return number


def whole(name: str, value: Any, low: int, high: int, meaning: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidOptionError(f"{name} must be a whole number, {meaning}, got {shown(value)}")
    number = int(value)
    if not low <= number <= high:
        raise InvalidOptionError(f"{name} must be {meaning}, got {shown(value)}")
    return number


def flag(name: str, value: Any) -> bool:
    if type(value) is bool:
        return value
    if not isinstance(value, bool | np.bool_):
        raise InvalidOptionError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Non-empty texts; one text alone counts as a list of one, None as an empty list."""
    if value is None:
        return ()
    found = _tuple(name, (value,) if isinstance(value, str) else value, "text, or a list of texts")
    for one in found:
        if not isinstance(one, str) or not one:
            raise InvalidOptionError(f"{name} must hold non-empty text only, got {shown(one)}")
    return tuple(str(one) for one in found)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """In their order, each once."""
    if value is None:
        return ()
    return tuple(dict.fromkeys(_token_id(name, one) for one in _tuple(name, value, "a list of token ids")))


def biases(name: str, value: Any, limit: float) -> dict[int, float]:
    """Token id -> what is added to its logit."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidOptionError(f"{name} must be a dictionary from token id to number, got {shown(value)}")
    meaning = f"within {-limit:g}..{limit:g}"
    return {
        _token_id(name, token): real(f"{name} of token {shown(token)}", bias, -limit, limit, meaning)
        for token, bias in value.items()
    }


def callables(name: str, value: Any, meaning: str) -> tuple[Callable[..., Any], ...]:
    found = _tuple(name, value, "a list")
    for one in found:
        if not callable(one):
            raise InvalidOptionError(f"{name} must be callables {meaning}, got {shown(one)}")
    return found


def _token_id(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidOptionError(f"{name} must hold token ids (whole numbers), got {shown(value)}")
    return int(value)


def _tuple(name: str, value: Any, meaning: str) -> tuple[Any, ...]:
    """Any collection of known size; None is an empty one, as in vLLM."""
    if value is None:
        return ()
    if isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping):
        try:
            return tuple(value)
        except Exception:  # such as a numpy array without dimensions, which only looks like a list
            pass
    raise InvalidOptionError(f"{name} must be {meaning}, got {shown(value)}")
