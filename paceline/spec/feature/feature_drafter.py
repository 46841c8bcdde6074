"""What proposers that live on the target's hidden states have in common: their network's place, rows and scratch.

A drafter's KV has the target's slots, for rows made from true features, and scratch slots behind them, for draft
nodes. Scratch is written anew by every draft, so a rejected node never has to be taken back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.errors import InvalidOptionError
from paceline.models.drafters.paged import KeyRows, Placement
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.draft_scores import DraftScores
from paceline.spec.feature.feature_queue import IntArray

SCRATCH_SLOTS = 4096
CHUNK_ROWS = 512  # features taken in by one call on a CPU, whose caches hold them
DEVICE_CHUNK_ROWS = 8192  # and on a device, where a call takes as long for one row as for hundreds
T = TypeVar("T")


def placement(services: EngineParts) -> Placement:
    threads = None if services.decoder is None else services.decoder.num_threads
    return Placement(services.device, services.num_threads or threads)


def chunks(num_rows: int, device: torch.device) -> Iterator[slice]:
    """So many rows of features at a time are taken in."""
    size = CHUNK_ROWS if device.type == "cpu" else DEVICE_CHUNK_ROWS
    return (slice(begin, begin + size) for begin in range(0, num_rows, size))


def target_of(services: EngineParts) -> Target:
    if services.decoder is None:
        raise InvalidOptionError("this drafter shares its target's embedding, but there is no target")
    return services.decoder


def draft_scores(services: EngineParts, d2t: Tensor, sampling: str | None) -> DraftScores:
    return DraftScores(d2t, services.vocab_size, sampling, placement(services).threads)


def groups(items: Sequence[T], slots_each: int) -> Iterator[Sequence[T]]:
    """So many at a time that their draft nodes fit into scratch."""
    size = max(1, SCRATCH_SLOTS // max(1, slots_each))
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def context_rows(positions: IntArray, slots: IntArray) -> KeyRows:
    """Rows that are only stored: they look at nothing."""
    none = np.zeros(len(slots), dtype=np.int32)
    return KeyRows(positions, slots, none, none, none, none, none[:0], none[:0])


@dataclass(slots=True)
class RowBuilder:
    """Rows of several requests, one call at a time over the same contexts."""

    key_slots: IntArray  # all contexts, one after the other
    begins: list[int]  # of each request's context
    lengths: list[int]

    @staticmethod
    def of(contexts: Sequence[IntArray]) -> "RowBuilder":
        lengths = [len(context) for context in contexts]
        begins = np.cumsum([0, *lengths])[:-1].tolist()
        return RowBuilder(np.concatenate(contexts) if contexts else np.zeros(0, np.int32), begins, lengths)

    def rows(
        self, owners: Sequence[int], positions: Sequence[int], slots: Sequence[int], tails: Sequence[Sequence[int]]
    ) -> KeyRows:
        """`owners`: which request each row belongs to; `tails`: slots that it sees after its request's context."""
        tail_lens = np.array([len(tail) for tail in tails], dtype=np.int32)
        return KeyRows(
            np.array(positions, dtype=np.int32),
            np.array(slots, dtype=np.int32),
            np.array([self.begins[i] for i in owners], dtype=np.int32),
            np.array([self.lengths[i] for i in owners], dtype=np.int32),
            np.cumsum(tail_lens, dtype=np.int32) - tail_lens,
            tail_lens,
            self.key_slots,
            np.array([slot for tail in tails for slot in tail], dtype=np.int32),
        )


def token_tensor(token_ids: Sequence[int] | IntArray) -> Tensor:
    return torch.from_numpy(np.asarray(token_ids, dtype=np.int32))
