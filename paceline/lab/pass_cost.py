"""What a target pass costs, as a function of its rows: measured, not assumed.

"Verification is free" is true only while a pass is bound by reading the weights. `PassCost` is the measured curve:
seconds of a pass at some numbers of rows, straight lines between them, the last slope beyond them.

>>> curve = PassCost.of({1: 0.010, 8: 0.012, 32: 0.030})
>>> round(curve(8) / curve(1), 2)
1.2
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class PassCost:
    rows: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise InvalidOptionError(f"a pass cost needs as many times as row counts, got {self.rows}, {self.seconds}")
        if any(later <= earlier for earlier, later in zip(self.rows, self.rows[1:], strict=False)):
            raise InvalidOptionError(f"row counts must ascend, got {self.rows}")
        if self.rows[0] < 1 or not all(np.isfinite(self.seconds)) or min(self.seconds) <= 0:
            raise InvalidOptionError(f"rows must be 1 or more and times positive, got {self.rows}, {self.seconds}")

    @staticmethod
    def of(seconds_by_rows: Mapping[int, float]) -> "PassCost":
        pairs = sorted((float(rows), float(seconds)) for rows, seconds in seconds_by_rows.items())
        return PassCost(tuple(rows for rows, _ in pairs), tuple(seconds for _, seconds in pairs))

    @staticmethod
    def linear(fixed_s: float, per_row_s: float) -> "PassCost":
        """fixed + per_row * rows: a GPU far from its compute limit has a small slope, a CPU a large one."""
        return PassCost.of({1: fixed_s + per_row_s, 2: fixed_s + 2 * per_row_s})

    @staticmethod
    def load(path: str | Path) -> "PassCost":
        """From a JSON file {"rows": seconds, ...}, as `paceline bench curve` writes it."""
        try:
            data = json.loads(Path(path).read_text())
            curve = data.get("pass_cost", data)
            return PassCost.of({int(rows): float(seconds) for rows, seconds in curve.items()})
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InvalidOptionError(
                f'{path} is not a pass cost: expected JSON such as {{"1": 0.010, "8": 0.012}} ({error})'
            ) from error

    def __call__(self, rows: float) -> float:
        return float(self.at(rows))

    def at(self, rows: ArrayLike) -> NDArray[np.float64]:
        wanted = np.asarray(rows, dtype=np.float64)
        inside = np.interp(wanted, self.rows, self.seconds)
        if len(self.rows) == 1:
            return inside
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return inside + max(slope, 0.0) * np.maximum(wanted - self.rows[-1], 0.0)


FREE = PassCost((1.0,), (1.0,))  # the textbook's assumption: any number of rows costs one step
