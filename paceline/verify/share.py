"""A share of a few answers, with the interval in which the true share lies.

>>> str(Share(3, 8))
'3 of 8 (38 %, 95 % interval 14 to 69 %)'
"""

import math
from dataclasses import dataclass

Z_95 = 1.959964  # the normal distribution has 95 % of its mass within so many standard deviations


@dataclass(frozen=True, slots=True)
class Share:
    count: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval, at 95 %. It says something at 0 and at all of them too: 0 of 8 may be up to 32 %."""
        if self.total == 0:
            return 0.0, 1.0
        share, weight = self.count / self.total, Z_95**2 / self.total
        middle = (share + weight / 2) / (1 + weight)
        half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        share = self.count / self.total if self.total else 0.0
        return (
            f"{self.count} of {self.total} ({share * 100:.0f} %, 95 % interval {low * 100:.0f} to {high * 100:.0f} %)"
        )
