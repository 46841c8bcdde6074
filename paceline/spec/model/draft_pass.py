"""A pass of a drafting model: some requests' tokens and draft nodes in one ragged batch.

Drafting writes keys and values into the slots past a request's last token, which the scheduler keeps free for it
(`Needs.lookahead_slots`). A chain goes on as if its tokens were committed, one row a pass. A tree is fed whole at every
level: the rows of its upper levels are computed again, which costs next to nothing beside reading the weights, and
saves every other bookkeeping of who may attend to whom.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.engine_parts import Decoder

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """One request's rows: tokens at positions [start, start + len(token_ids)), then nodes that hang on the last."""

    block_ids: Sequence[int]
    token_ids: Sequence[int]
    start: int
    nodes: DraftTree = EMPTY_TREE
    num_wanted: int = 1  # logits of that many last rows

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + len(self.nodes)


def run_pass(
    decoder: Decoder,
    kv_cache: Tensor,  # [layers, 2, slots, kv_heads, head_dim]
    block_size: int,
    entries: Sequence[DraftRows],
    layers: Sequence[int] | None = None,
) -> Tensor:
    """Logits of the wanted rows, request by request: [sum(num_wanted), vocab]."""
    batch = _pack(entries, block_size, decoder.device)
    return decoder.forward(batch, kv_cache, layers=layers).logits


def _pack(entries: Sequence[DraftRows], block_size: int, device: torch.device) -> ForwardBatch:
    num_rows = sum(entry.num_rows for entry in entries)
    # token, position, slot, context length, parent, is node, request
    rows = np.zeros((7, num_rows), dtype=np.int32)
    rows[4] = -1
    block_tables = np.zeros((len(entries), max(len(entry.block_ids) for entry in entries)), dtype=np.int32)
    cu_query = np.zeros(len(entries) + 1, dtype=np.int32)
    wanted: list[int] = []
    begin = 0
    for i, entry in enumerate(entries):
        end = begin + entry.num_rows
        table = block_tables[i, : len(entry.block_ids)]
        table[:] = entry.block_ids
        _fill(rows[:, begin:end], entry, begin)
        index = np.arange(entry.start, entry.start + entry.num_rows, dtype=np.int32)  # slot of row j is start + j
        rows[2, begin:end] = table[index // block_size] * block_size + index % block_size
        rows[6, begin:end] = i
        wanted.extend(range(end - entry.num_wanted, end))
        cu_query[i + 1] = begin = end
    on_device = torch.from_numpy(rows).to(device)
    return ForwardBatch(
        token_ids=on_device[0],
        positions=on_device[1],
        slot_mapping=on_device[2],
        context_lens=on_device[3],
        parents=on_device[4],
        is_node=on_device[5].bool(),
        req_ids=on_device[6],
        block_tables=torch.from_numpy(block_tables).to(device),
        cu_query=torch.from_numpy(cu_query).to(device),
        logits_rows=torch.tensor(wanted, dtype=torch.int32, device=device),
        block_size=block_size,
    )


def _fill(rows: IntArray, entry: DraftRows, first_row: int) -> None:
    """Tokens, positions, context lengths, parents and kinds of one request's rows: [7, rows], in place."""
    middle = len(entry.token_ids)
    num_tokens = entry.start + middle
    rows[0, :middle] = entry.token_ids
    rows[1, :middle] = np.arange(entry.start, num_tokens)
    rows[3, :middle] = rows[1, :middle] + 1
    if entry.nodes:
        parents = np.asarray(entry.nodes.parents, dtype=np.int32)
        rows[0, middle:] = entry.nodes.token_ids
        rows[1, middle:] = np.asarray(entry.nodes.depths(), dtype=np.int32) + (num_tokens - 1)
        rows[3, middle:] = num_tokens
        rows[4, middle:] = np.where(parents < 0, -1, parents + first_row + middle)
        rows[5, middle:] = 1
