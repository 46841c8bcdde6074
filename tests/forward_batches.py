"""Hand-made passes for tests: pack prompt chunks and draft trees of several requests into one `ForwardBatch`.

Each request gets blocks in a scrambled order, so that a kernel that ignores the block table fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.forward import ForwardBatch
from paceline.core.tree import EMPTY_TREE, DraftTree

BLOCK_SIZE = 16


@dataclass
class Rows:
    """One request's part of a pass: `new` committed tokens after `num_computed` earlier ones, then a tree."""

    request: int
    num_computed: int
    new: Sequence[int]
    tree: DraftTree = field(default_factory=lambda: EMPTY_TREE)


class Pool:
    """Block tables for a few requests, and the number of slots their KV cache needs."""

    def __init__(self, num_requests: int, max_tokens: int, seed: int = 0, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        blocks_each = -(-max_tokens // block_size)
        num_blocks = num_requests * blocks_each
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = order.view(num_requests, blocks_each).int()
        self.num_slots = num_blocks * block_size

    def slot(self, request: int, index: int) -> int:
        """Slot of the request's index-th token; tree nodes take the indices after its committed tokens."""
        return int(self.tables[request, index // self.block_size]) * self.block_size + index % self.block_size

    def batch(self, *parts: Rows, all_logits: bool = True, device: str = "cpu") -> ForwardBatch:
        rows: list[tuple[int, int, int, int, int, bool, int]] = []
        bounds, last_rows = [0], []
        for index, part in enumerate(parts):
            start = len(rows)
            for i, token in enumerate(part.new):
                position = part.num_computed + i
                slot = self.slot(part.request, position)
                rows.append((token, position, slot, position + 1, -1, False, index))
            committed, first_node = part.num_computed + len(part.new), len(rows)
            depths = part.tree.depths()
            for i, (token, parent) in enumerate(zip(part.tree.token_ids, part.tree.parents, strict=True)):
                slot = self.slot(part.request, committed + i)
                parent_row = -1 if parent < 0 else first_node + parent
                rows.append((token, committed - 1 + depths[i], slot, committed, parent_row, True, index))
            bounds.append(len(rows))
            last_rows.append(start + len(part.new) - 1)
        token_ids, positions, slots, context_lens, parents, is_node, req_ids = zip(*rows, strict=True)
        wanted = range(len(rows)) if all_logits else last_rows

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        return ForwardBatch(
            token_ids=ints(token_ids),
            positions=ints(positions),
            slot_mapping=ints(slots),
            context_lens=ints(context_lens),
            parents=ints(parents),
            is_node=torch.tensor(is_node, device=device),
            req_ids=ints(req_ids),
            block_tables=self.tables[[part.request for part in parts]].to(device),
            cu_query=ints(bounds),
            logits_rows=ints(wanted),
            block_size=self.block_size,
        )
