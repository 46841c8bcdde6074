"""Hand-made passes over a decoder: any rows of any requests together, and the logits of every one of them.

The engine packs passes of its own choice; the proof asks for the ones that it wants to compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.forward import Decoder, ForwardBatch
from paceline.core.kv_tensor import allocate_kv
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
        self._tables = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32).view(num_requests, blocks_each)
        self._kv = allocate_kv(decoder.config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)

    def logits(self, *parts: Part) -> Tensor:
        """[rows of all parts in order, vocab], on the CPU"""
        return self._decoder.forward(self._batch(parts), self._kv).logits.cpu().clone()

    def _slot(self, request: int, index: int) -> int:
        return int(self._tables[request, index // BLOCK_SIZE]) * BLOCK_SIZE + index % BLOCK_SIZE

    def _batch(self, parts: Sequence[Part]) -> ForwardBatch:
        rows: list[tuple[int, int, int, int, int, bool, int]] = []
        bounds = [0]
        for index, part in enumerate(parts):
            for position, token in enumerate(part.new, start=part.num_computed):
                rows.append((token, position, self._slot(part.request, position), position + 1, -1, False, index))
            committed, first_node = part.num_computed + len(part.new), len(rows)
            nodes = zip(part.tree.token_ids, part.tree.parents, part.tree.depths(), strict=True)
            for node, (token, parent, depth) in enumerate(nodes):
                slot = self._slot(part.request, committed + node)
                parent_row = -1 if parent < 0 else first_node + parent
                rows.append((token, committed - 1 + depth, slot, committed, parent_row, True, index))
            bounds.append(len(rows))
        columns = list(zip(*rows, strict=True))
        return ForwardBatch(
            token_ids=self._ints(columns[0]),
            positions=self._ints(columns[1]),
            slot_mapping=self._ints(columns[2]),
            context_lens=self._ints(columns[3]),
            parents=self._ints(columns[4]),
            is_node=self._ints(columns[5]).bool(),
            req_ids=self._ints(columns[6]),
            block_tables=self._tables[[part.request for part in parts]].to(self._decoder.device),
            cu_query=self._ints(bounds),
            logits_rows=self._ints(range(len(rows))),
            block_size=BLOCK_SIZE,
        )

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._decoder.device)
