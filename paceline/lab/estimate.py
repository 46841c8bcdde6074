"""A linear estimate that is learned one observation at a time, and knows how uncertain each of its weights is.

A Kalman filter with a diagonal covariance. What was learned ages: the variances grow with each observation, so that one
half-life of observations later the old ones count half.
"""

from collections.abc import Sequence


class Estimate:
    __slots__ = ("_most", "num_learned", "variances", "weights")

    def __init__(self, weights: Sequence[float], deviations: Sequence[float]) -> None:
        """What is believed of each weight before anything is seen, and its standard deviation."""
        self.weights = list(weights)
        self._most = [deviation * deviation for deviation in deviations]
        self.variances = list(self._most)
        self.num_learned = 0

    def at(self, features: Sequence[float]) -> float:
        return sum([weight * feature for weight, feature in zip(self.weights, features, strict=True)])

    def variance(self, features: Sequence[float]) -> float:
        return sum([one * feature * feature for one, feature in zip(self.variances, features, strict=True)])

    def learn(self, features: Sequence[float], error: float, noise: float, half_life: float) -> None:
        """`error`: what was seen less what was expected; `noise`: variance of what is seen."""
        growth = 2.0 ** (1.0 / half_life)
        weights, variances = self.weights, self.variances
        spread = 0.0
        for one, feature in zip(variances, features, strict=True):
            if feature:
                spread += one * feature * feature
        share = 1.0 / (spread * growth + noise)
        for i, feature in enumerate(features):
            doubt = variances[i] * growth
            if doubt > self._most[i]:
                doubt = self._most[i]
            if feature:
                gain = doubt * feature
                weights[i] += gain * error * share
                doubt -= gain * gain * share
            variances[i] = doubt
        self.num_learned += 1

    def age(self, num_observations: float, half_life: float) -> None:
        """As if so many observations had been missed."""
        growth = 2.0 ** max(0.0, min(60.0, num_observations / half_life))
        self.variances = [min(most, one * growth) for most, one in zip(self._most, self.variances, strict=True)]

    def state(self) -> list[float]:
        """To be kept, and given to `restore` of another one."""
        return [*self.weights, *self.variances]

    def restore(self, state: Sequence[float]) -> None:
        """Believed, though not as firmly as what will be seen."""
        count = len(self.weights)
        self.weights = list(state[:count])
        known = zip(self._most, state[count:], strict=True)
        self.variances = [min(most, 16.0 * one) for most, one in known]
