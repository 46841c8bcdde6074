"""What one target pass takes in and gives back.

A pass is a ragged batch of *rows*, one token each. The rows of a request stand together: first its committed tokens
that have no KV yet (a prompt chunk, or just the last token), then the nodes of its draft tree. A prompt chunk, a
plain decode step and a tree verification differ only in how many rows of which kind there are.

What row i attends to is fixed by two numbers and the block table, so that keys always come in position order:
- the KV slots of positions [0, context_lens[i]) of its request, through the block table, then
- for a tree node: its ancestors inside the pass, from the top one down to itself, found by following `parents`.
A committed row at position p has context_lens = p + 1 (itself included) and parents = -1. A tree node has
context_lens = number of committed tokens, parents = row of its parent node, or -1 under the last committed token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TokenDraws:
    """How the token of each logits row is drawn, for a decoder that draws by itself (`Decoder.draws_tokens`)."""

    temperatures: NDArray[np.float32]  # [num_logits]; 0: the likeliest token
    seeds: NDArray[np.int64]  # [num_logits]: the request's seed, its 64 bits read as a signed number
    positions: NDArray[np.int32]  # [num_logits]: the place in its text that the token will have


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    token_ids: Tensor  # [rows] int32
    positions: Tensor  # [rows] int32; of a node: committed tokens - 1 + its depth (top nodes have depth 1)
    slot_mapping: Tensor  # [rows] int32: where the row's key and value are written
    context_lens: Tensor  # [rows] int32
    parents: Tensor  # [rows] int32: row index in this batch, or -1
    is_node: Tensor  # [rows] bool: the row is a tree node (its own slot is not below context_lens)
    req_ids: Tensor  # [rows] int32: index of the row's request, a row of block_tables
    block_tables: Tensor  # [requests, max_blocks] int32
    cu_query: Tensor  # [requests + 1] int32: rows [cu_query[r], cu_query[r+1]) are request r's
    logits_rows: Tensor  # [num_logits] int32: rows whose logits are wanted
    block_size: int
    draws: TokenDraws | None = None  # None: no tokens are wanted; only for a decoder that draws
    wants_logits: bool = True  # a decoder that draws may leave them out where nobody reads them
    follows: Tensor | None = None
    """[rows] int32: the row's token is what the pass before drew at its logits row of this number; -1: it is in
    `token_ids`. Only for a decoder that can be launched ahead, see models/padded_decoder.py."""

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def to(self, device: torch.device) -> "ForwardBatch":
        """The same batch with its tensors there. They are made on the host (core/packing.py)."""
        if self.token_ids.device.type == device.type:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            context_lens=self.context_lens.to(device),
            parents=self.parents.to(device),
            is_node=self.is_node.to(device),
            req_ids=self.req_ids.to(device),
            block_tables=self.block_tables.to(device),
            cu_query=self.cu_query.to(device),
            logits_rows=self.logits_rows.to(device),
            follows=None if self.follows is None else self.follows.to(device),
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    logits: Tensor  # [num_logits, vocab] float32, until the next pass; [0, vocab] where nobody wanted them
    hidden: Tensor | None = None
    """[rows, len(hidden_layers), hidden_size], where hidden states were asked for.

    Layer id i in 0..N-1 is the residual stream entering layer i, N the one leaving the last layer, and
    N+1 is after the final norm."""
    tokens: list[int | None] | None = None
    """[num_logits], where draws were given; None: this row cannot be sampled, or on a CPU its logits have to say.

    Of a draft's nodes only those matter to which a path of drawn tokens leads; what stands at others is no token."""


class PendingPass(Protocol):
    """A pass that was launched. Passes run in the order of their launch."""

    def collect(self) -> ForwardOutput: ...  # waits for it; to be called once


@dataclass(frozen=True, slots=True)
class DonePass:
    """A pass of a decoder that comes back when it is done."""

    output: ForwardOutput

    def collect(self) -> ForwardOutput:
        return self.output


class Decoder(Protocol):
    """A model that runs passes over a paged KV cache."""

    config: ModelConfig
    dtype: torch.dtype  # of the KV cache
    device: torch.device
    batch_invariant: bool  # the bits of a row's logits do not depend on what else is in the pass
    draws_tokens: bool  # it honours ForwardBatch.draws

    @property
    def num_threads(self) -> int | None: ...  # of its own kernels; None where PyTorch's or a GPU's compute

    def forward(
        self,
        batch: ForwardBatch,  # on the host or on its device
        kv_cache: Tensor,  # [layers, 2 (keys, values), slots, kv heads, head dim]
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,  # run only these (self-speculation); None: all
    ) -> ForwardOutput: ...


class Target(Decoder, Protocol):
    """A decoder that others may draft for: they share its embedding and its head."""

    hidden_dtype: torch.dtype  # of hidden states, and of weights that are plain

    @property
    def handle(self) -> int | None: ...  # of the native model, for native drafters; None where it is none

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor: ...  # [len(ids), hidden] float32
