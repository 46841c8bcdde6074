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
    hidden_layers: tuple[int, ...]  # of the target, for TargetPass.features

    @property
    def network(self) -> nn.Module: ...

    def calibrate(self, batch: Batch) -> None:
        """Look at one batch before training starts or goes on, to set scales."""

    def finish(self) -> None:
        """Training is over: bring the network into its final form."""

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


class FusionScale:
    """Keeps the target's hidden states near size 1 in front of `fc`, whatever the layer, while training.

    Their size grows twentyfold from the first layers to the last, and one learning rate has to suit them all. When
    training is over the scale is folded into the weights, so the finished drafter takes hidden states as they are."""

    def __init__(self, fc: nn.Linear, target: DenseTarget, hidden_layers: Sequence[int]) -> None:
        self.fc, self.target, self.hidden_layers = fc, target, hidden_layers
        self.sizes = torch.ones(len(hidden_layers), 1, device=target.device)

    @torch.no_grad()
    def calibrate(self, batch: Batch) -> None:
        features = self.target.forward(batch.tokens, self.hidden_layers).features
        sizes = features[batch.is_answer()].float().square().mean(-1).sqrt()  # [rows, layers]
        self.sizes = sizes.median(dim=0).values[:, None]  # a mean would follow the outliers of the first tokens

    def __call__(self, features: Tensor) -> Tensor:
        """[..., layers, hidden]"""
        return features / self.sizes.to(features.dtype)

    @torch.no_grad()
    def fold(self) -> None:
        by_layer = self.fc.weight.unflatten(1, (len(self.hidden_layers), -1))  # type: ignore[no-untyped-call]
        self.fc.weight.copy_((by_layer / self.sizes).flatten(1))
        self.sizes = torch.ones_like(self.sizes)
