"""The inequality that decides about a drafter, kept as numbers and said in words.

    ngram: off, 0.31 tokens gained < 0.42 tokens' worth of time (1.9 ms at 221 tok/s)

Gained are the tokens that its drafts bring in a step; the time is its own and that of its nodes' rows; what time is
worth are the tokens that the batch makes in it without the drafter.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(slots=True)
class Inequality:
    """Running averages, with the weights of the decision that they explain."""

    gain: float = 0.0  # tokens
    price_s: float = 0.0
    tokens_per_s: float = 0.0  # 0: nothing was judged so far
    num_judged: int = 0  # steps, or requests' steps

    def learn(self, weight: float, gain: float, price_s: float, token_s: float) -> None:
        """`token_s`: what a token costs without the drafter."""
        self.num_judged += 1
        weight = max(weight, 1.0 / self.num_judged)
        self.gain += weight * (gain - self.gain)
        self.price_s += weight * (price_s - self.price_s)
        self.tokens_per_s += weight * (1.0 / token_s - self.tokens_per_s)

    @property
    def price(self) -> float:
        """In tokens."""
        return self.price_s * self.tokens_per_s

    def reason(self, decision: str, is_used: bool | None, gained: str = "gained") -> "Reason":
        """`decision`, in words. `is_used`: is it what a gain above the price would lead to? Where both sides are about
        the same it may be either, and the words say so; None: nothing is decided yet."""
        state = decision.split(" for ")[0]
        if not self.tokens_per_s:
            return Reason(self, f"{state}: nothing judged yet", f"{decision}, nothing judged yet")
        pays = self.gain > self.price
        sign = ">" if pays else "<"
        time = f"{1e3 * self.price_s:.1f} ms at {self.tokens_per_s:.0f} tok/s"
        sides = f"{self.gain:.2f} tokens {gained} {sign} {self.price:.2f} tokens' worth of time ({time})"
        close = "" if is_used in (None, pays) else ": not clear enough to change that"
        return Reason(self, f"{state}: gain {sign} price", f"{decision}, {sides}{close}")


class Reason(NamedTuple):
    inequality: Inequality
    decided: str  # one of a few texts, such as "off: gain < price"
    words: str  # with the numbers

    def figures(self, name: str) -> dict[str, Any]:
        one = self.inequality
        figures = {"gain_tokens": one.gain, "price_tokens": one.price, "price_s": one.price_s}
        return figures | {"decided": self.decided, "reason": f"{name}: {self.words}"}
