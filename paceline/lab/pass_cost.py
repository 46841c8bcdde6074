"""What a target pass costs, as a function of its rows: measured, not assumed.

"Verification is free" is true only while a pass is bound by reading the weights. `PassCost` is the measured curve:
seconds of a pass at some numbers of rows, straight lines between them, the last slope beyond them. A curve that goes on
learning from the passes of a running engine is `PassCostModel` (live_pass_cost.py).

>>> curve = PassCost.of({1: 0.010, 8: 0.012, 32: 0.030})
>>> round(curve(8) / curve(1), 2)
1.2
"""

import bisect
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import InvalidOptionError


@dataclass(frozen=True, slots=True)
class PassCost:
    rows: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]
    further_row_s: float | None = None  # each row beyond the last point; None: as between the last two points

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise InvalidOptionError(f"a pass cost needs as many times as row counts, got {self.rows}, {self.seconds}")
        if any(later <= earlier for earlier, later in itertools.pairwise(self.rows)):
            raise InvalidOptionError(f"row counts must ascend, got {self.rows}")
        if self.rows[0] < 1 or not all(map(math.isfinite, self.seconds)) or min(self.seconds) <= 0:
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

    def with_mean_slope(self) -> "PassCost":
        """Beyond the last point the slope from the first to the last: one measurement cannot bend all that follows."""
        if len(self.rows) == 1:
            return self
        slope = max(0.0, self.seconds[-1] - self.seconds[0]) / (self.rows[-1] - self.rows[0])
        return replace(self, further_row_s=slope)

    def __call__(self, rows: float) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0]
        right = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        left_rows, right_rows = self.rows[right - 1], self.rows[right]
        left_s, right_s = self.seconds[right - 1], self.seconds[right]
        if rows <= right_rows:
            return left_s + (right_s - left_s) * (rows - left_rows) / (right_rows - left_rows)
        further_row_s = self.further_row_s
        if further_row_s is None:
            further_row_s = max(0.0, right_s - left_s) / (right_rows - left_rows)
        return right_s + further_row_s * (rows - right_rows)


FREE = PassCost((1.0,), (1.0,))  # the textbook's assumption: any number of rows costs one step
