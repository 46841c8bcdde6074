"""Options of the drafting methods: a default, a check, and a line that says what the option means.

An option is a row of a table, so a method's file never parses anything: its constructor gets checked values.

>>> Option(4, whole(1, 64), "draft tokens along one path").check("num_speculative_tokens", 8)
8
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidOptionError

Check = Callable[[str, Any], Any]  # (option name, what was given) -> the value to use; raises InvalidOptionError


@dataclass(frozen=True, slots=True)
class Option:
    default: Any
    check: Check
    meaning: str


def whole(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidOptionError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
        return value

    return check


def real(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # NaN fails the comparison
            raise InvalidOptionError(f"{name} must be a number from {low} to {high}, got {value!r}")
        return float(value)

    return check


def positive(high: float) -> Check:
    def check(name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0.0 < value <= high:  # NaN fails the comparison
            raise InvalidOptionError(f"{name} must be a number above 0 and at most {high}, got {value!r}")
        return float(value)

    return check


def choice(*names: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in names:
            raise InvalidOptionError(f"{name} must be one of {', '.join(names)}; got {value!r}")
        return str(value)

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} must be True or False, got {value!r}")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidOptionError(f"{name} must be non-empty text, got {value!r}")
    return value


def whole_list(low: int, high: int) -> Check:
    """Non-empty lists of whole numbers; kept as a tuple so that a config stays hashable."""
    item = whole(low, high)

    def check(name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise InvalidOptionError(f"{name} must be a list of whole numbers, got {value!r}")
        numbers = tuple(item(f"{name}[{i}]", number) for i, number in enumerate(value))
        if not numbers:
            raise InvalidOptionError(f"{name} must not be empty; leave it out for the default")
        return numbers

    return check


def chance_table(name: str, value: Any) -> tuple[tuple[float, ...], ...]:
    """Rows of chances, such as [[0.5, 0.2], [0.6, 0.1]]: by depth, then by rank."""
    chance = real(0.0, 1.0)
    rows = value if isinstance(value, list | tuple) else ()
    if not rows or not all(isinstance(row, list | tuple) and row for row in rows):
        raise InvalidOptionError(f"{name} must be rows of chances by depth, such as [[0.5, 0.2]], got {value!r}")
    return tuple(tuple(chance(f"{name}[{i}][{k}]", one) for k, one in enumerate(row)) for i, row in enumerate(rows))


def optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def either(first: Check, second: Check) -> Check:
    """What the first check takes, else what the second takes (whose error is the one shown)."""

    def check(name: str, value: Any) -> Any:
        try:
            return first(name, value)
        except InvalidOptionError:
            return second(name, value)

    return check


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise for the first key that is not known, naming the nearest one and the whole list."""
    known = sorted(known)
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidOptionError(f"unknown key {key!r} in {where}.{hint} Known: {', '.join(known) or 'none'}")


def resolve(options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults overlaid with what was given, every value checked."""
    return {name: option.check(name, given.get(name, option.default)) for name, option in options.items()}
