"""How many tokens per target pass a drafter would bring, found without running the engine.

On a greedy answer the drafts after token t are right or wrong, full stop: with the true tokens fed in (teacher forcing)
draft k counts only if drafts 1..k-1 were right, which is exactly when the engine would have fed the same tokens. So
walking through an answer in steps of (accepted drafts + 1) gives a chain's greedy acceptance length, not an estimate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.corpus import Batch
from paceline.train.recipe import Recipe
from paceline.train.target import DenseTarget


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chains of `len(per_position)` drafts on held-out answers."""

    mean_acceptance_length: float  # tokens per target pass, the bonus counted
    per_position: list[float]  # share of passes in which draft 1, 2, ... was accepted
    num_passes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "per_position": [round(share, 4) for share in self.per_position],
            "num_passes": self.num_passes,
        }


@torch.no_grad()
def measure_acceptance(recipe: Recipe, target: DenseTarget, batches: Iterable[Batch], num_tokens: int) -> Acceptance:
    passes, tokens = 0, 0
    accepted_at = torch.zeros(num_tokens, dtype=torch.long)
    for batch in batches:
        drafts = recipe.drafts(batch, target.forward(batch.tokens, recipe.hidden_layers), num_tokens)
        counts = count_accepted(batch, drafts).tolist()
        bounds = zip(counts, batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
        for row, prompt_length, length in bounds:
            position = prompt_length  # the prompt's own pass brings the first token
            while position < length - 1:
                # Past the end nothing is emitted, whatever was drafted.
                accepted = min(row[position], length - 2 - position)
                passes += 1
                tokens += accepted + 1
                accepted_at[:accepted] += 1
                position += accepted + 1
    return Acceptance(
        tokens / passes if passes else 0.0, [int(n) / passes if passes else 0.0 for n in accepted_at], passes
    )


def count_accepted(batch: Batch, drafts: Tensor) -> Tensor:
    """[sequences, positions]: how many drafts after each token are right, up to the first wrong one."""
    num_tokens = drafts.shape[-1]
    right = torch.stack([drafts[..., k] == batch.shifted(1 + k) for k in range(num_tokens)], dim=-1)
    return right.long().cumprod(-1).sum(-1)
