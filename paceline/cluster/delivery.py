"""What of a request has been delivered, whoever computed it.

A request may be run by several workers one after another (attempts). An item is taken only if it belongs to the current
attempt and begins exactly where the delivered tokens end: so no token is lost, doubled or taken from a worker that was
given up. Every next attempt resumes after the delivered tokens, and because the text is a function of (model, prompt,
seed), it goes on as the one before would have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class OutOfStepError(Exception):
    """An item of the current attempt that does not go on where the delivered tokens end: its worker is not sound."""


@dataclass(slots=True)
class Delivery:
    num_samples: int
    attempt: int = 0
    tokens: list[list[int]] = field(init=False)  # per sample
    cumulative: list[float] = field(init=False)  # log-probability of these tokens, added up one by one
    _ended: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.num_samples)]
        self.cumulative = [0.0] * self.num_samples
        self._ended = [False] * self.num_samples

    @property
    def has_begun(self) -> bool:
        return any(self.tokens)

    def next_attempt(self) -> int:
        self.attempt += 1
        return self.attempt

    def output_token_ids(self) -> list[int] | list[list[int]] | None:
        """For the next attempt; None where nothing was delivered."""
        if not self.has_begun:
            return None
        return self.tokens[0] if self.num_samples == 1 else self.tokens

    def take(self, item: Mapping[str, Any]) -> bool:
        """Note an item's tokens; False: it is an old attempt's, to be dropped.

        Samples that ended in an earlier attempt end again at once in the next: these are taken out of the item."""
        if item["attempt"] != self.attempt:
            return False
        samples = item["outputs"]
        for sample in samples:
            if sample["offset"] != len(self.tokens[sample["index"]]):
                raise OutOfStepError(
                    f"tokens from {sample['offset']} on, where {len(self.tokens[sample['index']])} were delivered"
                )
        samples[:] = [sample for sample in samples if not self._ended[sample["index"]]]
        for sample in samples:
            index = sample["index"]
            self.tokens[index] += sample["token_ids"]
            self._ended[index] = "end" in sample
            if "logprobs" in sample:  # an attempt knows its own tokens only
                for _, logprob, *_ in sample["logprobs"]:
                    self.cumulative[index] += logprob
                sample["cumulative"] = self.cumulative[index]
        return True
