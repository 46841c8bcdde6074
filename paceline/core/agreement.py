"""How far a model's distributions of the next token are from a reference's, over the positions of a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOT_COUNTED = -1


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that models are compared on."""

    token_ids: Sequence[int]
    num_prompt_tokens: int  # the rest was written by a model, so it says nothing about perplexity

    def next_ids(self) -> Tensor:
        """[tokens]: what follows each token, where it counts"""
        ids = torch.tensor([*self.token_ids[1:], NOT_COUNTED])
        ids[max(0, self.num_prompt_tokens - 1) :] = NOT_COUNTED
        return ids


@dataclass(slots=True)
class Agreement:
    """Sums over positions, in nats; `add` them up, then read the figures."""

    num_positions: int = 0
    num_same_top: int = 0
    total_divergence: float = 0.0
    num_next: int = 0  # positions whose next token counts for the perplexity
    surprise: float = 0.0
    reference_surprise: float = 0.0

    def add(self, reference: Tensor, logits: Tensor, next_ids: Tensor) -> None:
        """reference, logits: [rows, vocab] float32; next_ids: [rows], NOT_COUNTED where no perplexity is wanted"""
        expected, found = reference.log_softmax(-1), logits.log_softmax(-1)
        self.num_positions += reference.shape[0]
        self.num_same_top += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self.total_divergence += float((expected.exp() * (expected - found)).sum(dtype=torch.float64))
        rows = (next_ids != NOT_COUNTED).nonzero().flatten()
        ids = next_ids[rows].long()
        self.num_next += len(rows)
        self.surprise -= float(found[rows, ids].sum(dtype=torch.float64))
        self.reference_surprise -= float(expected[rows, ids].sum(dtype=torch.float64))

    @property
    def divergence(self) -> float:
        """Mean Kullback-Leibler divergence from the reference, nats per token."""
        return self.total_divergence / max(1, self.num_positions)

    @property
    def same_top(self) -> float:
        """The share of positions at which both find the same token the likeliest."""
        return self.num_same_top / max(1, self.num_positions)

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / max(1, self.num_next))

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_surprise / max(1, self.num_next))

    def to_dict(self) -> dict[str, Any]:
        return {
            "positions": self.num_positions,
            "kl": self.divergence,
            "same_top": self.same_top,
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
        }
