"""Hand-made passes over a decoder: any rows of any requests together, and the logits of every one of them.

The engine packs passes of its own choice; the proof asks for the ones that it wants to compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.forward import Decoder
from paceline.core.kv_tensor import allocate_kv
from paceline.core.packing import RequestRows, pack
from paceline.core.tree import EMPTY_TREE, DraftTree

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One request's rows of a pass: new tokens after those that have keys and values already, then a tree."""

    request: int
    num_computed: int
    new: Sequence[int]
    tree: DraftTree = EMPTY_TREE


class Passes:
    """A KV cache for a few requests, and passes over it."""

    def __init__(self, decoder: Decoder, num_requests: int, max_tokens: int) -> None:
        self._decoder = decoder
        blocks_each = -(-max_tokens // BLOCK_SIZE)
        num_blocks = num_requests * blocks_each
        # Last block first, so that no request's tokens lie in order.
        self._tables = [range(end, end - blocks_each, -1) for end in range(num_blocks - 1, -1, -blocks_each)]
        self._kv = allocate_kv(decoder.config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)

    def logits(self, *parts: Part) -> Tensor:
        """[rows of all parts in order, vocab], on the CPU"""
        batch = pack([self._rows(part) for part in parts], BLOCK_SIZE)
        return self._decoder.forward(batch, self._kv).logits.cpu().clone()

    def _rows(self, part: Part) -> RequestRows:
        num_rows = len(part.new) + len(part.tree)
        return RequestRows(self._tables[part.request], part.new, part.num_computed, part.tree, num_wanted=num_rows)
