"""Medusa: a few small heads on the target's last hidden state, each guessing one position further ahead.

From the hidden state at position t (after the final norm) the target itself predicts x_{t+1}; head i predicts x_{t+2+i}
from the same vector: residual blocks x + SiLU(W x + b), then a vocabulary matrix. No attention and no KV, so a step
costs little, but a guess does not know the guesses before it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    hidden_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int = 1  # residual blocks per head
    shared_head: bool = False  # all heads end in one vocabulary matrix, the target's own rows


class ResidualBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)  # starts as the identity: every head begins as the target's own head
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    d2t: Tensor  # [draft vocab] int64

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        count = 1 if config.shared_head else config.num_heads
        self.heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(count)
        )
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)

    def features(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [heads, ..., hidden], ready for the vocabulary matrices"""
        return torch.stack([block(hidden) for block in self.blocks])

    def residual_blocks(self, index: int) -> list[ResidualBlock]:
        """Those of one head, in order."""
        return [block for block in self.blocks[index].children() if isinstance(block, ResidualBlock)]

    def head(self, index: int) -> nn.Linear:
        head = self.heads[0 if self.config.shared_head else index]
        assert isinstance(head, nn.Linear)
        return head

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [heads, ..., draft vocab]"""
        return torch.stack([self.head(i)(x) for i, x in enumerate(self.features(hidden))])
