"""Does speculation pay, and with how many draft tokens?

Per step, B requests each draft K tokens and the target verifies B * (K + 1) rows:

    tokens  = B * E(K)                     E: expected_tokens
    seconds = K * draft_s + T(B * (K + 1)) T: the measured pass cost
    speedup = (tokens / seconds) / (B / T(B))

With a free pass, T(rows) = T(1), and c = draft_s / T(1) this is the textbook's E(K) / (K c + 1). The answer may be
"turn it off": best_k is 0 where no K beats plain decoding.

>>> speculation = Speculation(acceptance=0.8, draft_s=0.05)
>>> best_k(speculation).num_draft_tokens
8
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import InvalidOptionError
from paceline.lab.expected import expected_tokens
from paceline.lab.pass_cost import FREE, PassCost


@dataclass(frozen=True, slots=True)
class Speculation:
    """One operating point, but for the number of draft tokens."""

    acceptance: float | Sequence[float]
    draft_s: float = 0.0  # seconds that one more draft token takes, the whole batch together
    draft_fixed_s: float = 0.0  # seconds per step of drafting whatever the number (an n-gram lookup)
    pass_cost: PassCost = FREE
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidOptionError(f"the batch must hold at least 1 request, got {self.batch}")
        if self.draft_s < 0 or self.draft_fixed_s < 0:
            raise InvalidOptionError(f"draft times must be 0 or more, got {self.draft_s} and {self.draft_fixed_s}")


@dataclass(frozen=True, slots=True)
class Choice:
    num_draft_tokens: int  # 0: leave speculation off
    speedup: float


def speedup(speculation: Speculation, num_draft_tokens: int) -> float:
    """Tokens per second over plain decoding's."""
    if num_draft_tokens == 0:
        return 1.0
    s = speculation
    seconds = s.pass_cost(s.batch * (num_draft_tokens + 1)) + num_draft_tokens * s.draft_s + s.draft_fixed_s
    return expected_tokens(s.acceptance, num_draft_tokens) * s.pass_cost(s.batch) / seconds


def best_k(speculation: Speculation, max_draft_tokens: int = 32) -> Choice:
    """The best number of draft tokens; 0 where nothing beats plain decoding."""
    rates = speculation.acceptance
    most = max_draft_tokens if isinstance(rates, int | float) else min(max_draft_tokens, len(rates))
    choices = (Choice(k, speedup(speculation, k)) for k in range(most + 1))
    return max(choices, key=lambda choice: choice.speedup)  # ties: the fewest tokens


def break_even_acceptance(speculation: Speculation, num_draft_tokens: int) -> float | None:
    """The acceptance rate from which K draft tokens pay; None where even perfect drafts lose."""

    def gain(rate: float) -> float:
        return speedup(replace(speculation, acceptance=rate), num_draft_tokens) - 1.0

    if num_draft_tokens == 0 or gain(0.0) >= 0:
        return 0.0
    if gain(1.0) < 0:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):  # the speedup grows with the rate, so bisection finds the one crossing
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return high
