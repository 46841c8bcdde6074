"""What the trainer needs to know about a method: its network, its loss, and how far its drafts would be accepted.

A recipe is one file: `eagle3.py`, `medusa.py`, `dflash.py`, `draft.py`. `METHODS` (methods.py) is the table.
"""

from collections.abc import Iterator, Sequence
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

    @property
    def vocabulary(self) -> "DraftVocabulary": ...

    @property
    def head(self) -> Tensor:
        """[draft vocab, hidden]: what draft states are multiplied with"""

    def draft_states(self, batch: Batch, target: TargetPass, num_tokens: int) -> Iterator[Tensor]:
        """Draft by draft [sequences, positions, hidden]: at [s, t] of number k the state whose scores are those of
        position t + 1 + k, made when token t was the last one, provided that the drafts before it were right. May
        end early: no more drafts. Zeros where there is none."""


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


def shift_states(states: Tensor, places: int) -> Tensor:
    """[sequences, positions, hidden], moved to the right (or left, if negative) by some places, zeros behind."""
    moved = torch.zeros_like(states)
    if places > 0:
        moved[:, places:] = states[:, :-places]
    else:
        moved[:, : states.shape[1] + places] = states[:, -places:]
    return moved


class FusionScale:
    """Keeps the target's hidden states near size 1 in front of `fc`, whatever the layer, while training.

    Their size grows twentyfold from the first layers to the last, and one learning rate has to suit them all. When
    training is over the scale is folded into the weights, so the finished drafter takes hidden states as they are."""

    def __init__(self, fc: nn.Linear, target: DenseTarget, hidden_layers: Sequence[int]) -> None:
        self.fc, self.target, self.hidden_layers = fc, target, hidden_layers
        self.sizes = torch.ones(len(hidden_layers), 1, device=target.device)
        self.starts_folded = False  # `fc` comes from a finished drafter: it takes hidden states as they are

    @torch.no_grad()
    def calibrate(self, batch: Batch) -> None:
        features = self.target.forward(batch.tokens, self.hidden_layers).features
        sizes = features[batch.is_answer()].float().square().mean(-1).sqrt()  # [rows, layers]
        self.sizes = sizes.median(dim=0).values[:, None]  # a mean would follow the outliers of the first tokens
        if self.starts_folded:
            self._rescale(self.sizes)
            self.starts_folded = False

    def __call__(self, features: Tensor) -> Tensor:
        """[..., layers, hidden]"""
        return features / self.sizes.to(features.dtype)

    @torch.no_grad()
    def fold(self) -> None:
        self._rescale(1 / self.sizes)
        self.sizes = torch.ones_like(self.sizes)

    def _rescale(self, factors: Tensor) -> None:
        by_layer = self.fc.weight.unflatten(1, (len(self.hidden_layers), -1))  # type: ignore[no-untyped-call]
        self.fc.weight.copy_((by_layer * factors).flatten(1))
