"""What one more of x adds to y, by running averages.

A draft has a part that does not depend on its levels, and stopping saves only the levels' own time: on two Zen 5 cores
an EAGLE-3 draft takes 0.44 ms and 0.11 ms a level.

>>> costs = Slope()
>>> for levels in (1, 3, 2, 4) * 20:
...     level_s = costs.learn(0.1, levels, 0.44e-3 + 0.11e-3 * levels)
>>> round(level_s, 6)
0.00011
"""

from dataclasses import dataclass

LEAST_SHARE = 0.1  # of y / x: noise must not make more of x free
LEAST_VARIANCE = 0.1  # of x: below, a slope is mostly noise


@dataclass(slots=True)
class Slope:
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0  # variance
    xy: float = 0.0  # covariance

    def learn(self, weight: float, x: float, y: float) -> float:
        """The slope as it is now known: at most y / x, and as much while x has hardly varied."""
        dx, dy = x - self.x, y - self.y
        self.x, self.y = self.x + weight * dx, self.y + weight * dy
        self.xx = (1.0 - weight) * (self.xx + weight * dx * dx)
        self.xy = (1.0 - weight) * (self.xy + weight * dx * dy)
        most = self.y / self.x
        return min(most, max(self.xy / self.xx, LEAST_SHARE * most)) if self.xx > LEAST_VARIANCE else most
