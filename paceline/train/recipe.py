"""What the trainer needs to know about a method: its network, its loss, and how far its drafts would be accepted.

A recipe is one file: `eagle3.py`, `medusa.py`, `dflash.py`, `draft.py`. `METHODS` (methods.py) is the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.train.corpus import Batch
from paceline.train.target import DenseTarget, TargetPass


@dataclass(slots=True)
class LossOutput:
    loss: Tensor  # scalar, a mean over drafted positions
    agreement: list[Tensor] = field(
        default_factory=list
    )  # per draft position: share of first choices like the teacher's


class Recipe(Protocol):
    name: str
    network: nn.Module
    hidden_layers: tuple[int, ...]  # of the target, for TargetPass.features

    def calibrate(self, batch: Batch) -> None:
        """Look at one batch before training starts, to set scales."""

    def loss(self, batch: Batch, target: TargetPass, step: int) -> LossOutput: ...

    def drafts(self, batch: Batch, target: TargetPass, num_tokens: int) -> Tensor:
        """[sequences, positions, num_tokens] target ids: at [s, t, k] the draft for position t + 1 + k, made when
        token t was the last one, provided that the drafts before it were right. -1: no draft."""


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The target's tokens that a drafter can propose."""

    ids: Tensor  # [draft vocab] int64, ascending: target id of each draft id
    known: Tensor  # [vocab] bool: the target's token is among them
    head: Tensor  # [draft vocab, hidden]: the target's own rows

    @staticmethod
    def of(target: DenseTarget, ids: Tensor) -> "DraftVocabulary":
        ids = ids.to(target.device)
        known = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=target.device)
        known[ids] = True
        return DraftVocabulary(ids, known, target.head[ids])


@torch.no_grad()
def scale_fusion(fc: nn.Linear, target: DenseTarget, batch: Batch, hidden_layers: Sequence[int]) -> None:
    """Start `fc` so that every target layer has the same say, whatever the size of its hidden states."""
    features = target.forward(batch.tokens, hidden_layers).features
    sizes = features[batch.is_answer()].float().square().mean(-1).sqrt()  # [rows, layers]
    typical = sizes.median(dim=0).values  # a mean would follow the outliers of the first tokens
    nn.init.normal_(fc.weight, std=fc.in_features**-0.5)
    fc.weight.view(fc.out_features, len(hidden_layers), -1).div_(typical[:, None])
