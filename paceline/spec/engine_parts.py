"""What a proposer may use when it is built: handed over once by the engine, so that `spec/` never imports it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.model_config import ModelConfig


class Decoder(Protocol):
    """A model that runs ragged batches of rows over a paged KV cache."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,  # [layers, 2, num_slots, kv_heads, head_dim]
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput: ...


class Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Services:
    vocab_size: int
    max_model_len: int
    block_size: int = 16
    num_slots: int = 0  # of kv_cache; a drafter's own KV has as many, addressed by the same block tables
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    decoder: Decoder | None = None  # the target
    kv_cache: Tensor | None = None  # the target's: [layers, 2, num_slots, kv_heads, head_dim]
    tokenizer: Tokenizer | None = None
    num_threads: int | None = None
