"""One line of the report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    kind: str  # rules, greedy, seeded, forcing, distribution
    case: str  # what was looked at
    passed: bool
    finding: str  # in words, with the number that decided
    figures: dict[str, Any] = field(default_factory=dict)  # for the JSON file
    seconds: float = 0.0


Report = Callable[[Check], None]
