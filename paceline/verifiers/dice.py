"""The two kinds of random decision a rule makes: flip a coin, draw a token.

A rule never touches a random number. It asks its dice, and everything else it computes is a pure function of
probabilities. So a test can hand it dice that take every way out in turn, and add up the exact distribution of what
the real rule emits; and in the engine `KeyedDice` makes each decision a pure function of what it decides.
"""

from typing import Protocol

from paceline.core.request import Request
from paceline.ops.random import Purpose, keyed_coin, noise_key, pick
from paceline.ops.sampling_types import Probs


class Dice(Protocol):
    def accept(self, probability: float, purpose: Purpose, index: int) -> bool: ...

    def choose(self, probs: Probs, purpose: Purpose, index: int = 0) -> int: ...


class KeyedDice:
    """Fresh for every decision: a step is named by the request's length, which grows with every step, and inside a
    step (purpose, index) names the decision."""

    def __init__(self, request: Request) -> None:
        self._seed = request.seed
        self._base = request.num_tokens

    def accept(self, probability: float, purpose: Purpose, index: int) -> bool:
        return accepts(self._uniform(purpose, index), probability)

    def choose(self, probs: Probs, purpose: Purpose, index: int = 0) -> int:
        return pick(self._uniform(purpose, index), probs)

    def _uniform(self, purpose: Purpose, index: int) -> float:
        return keyed_coin(noise_key(self._seed, self._base, purpose, index))


def accepts(u: float, probability: float) -> bool:
    """Strictly below: nothing of probability 0 gets through, not even at u = 0."""
    return u < probability
