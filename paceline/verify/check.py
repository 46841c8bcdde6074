"""One line of the report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    kind: str  # rules, bits, greedy, seeded, forcing, distribution
    case: str  # what was looked at
    passed: bool
    finding: str  # in words, with the number that decided
    figures: dict[str, Any] = field(default_factory=dict)  # for the JSON file
    seconds: float = 0.0
    explained_by_rounding: bool = False
    """It failed on a backend that promises no bits, by no more than the rounding of passes of different shapes."""


Report = Callable[[Check], None]
