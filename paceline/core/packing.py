"""The one place that makes a `ForwardBatch`: rows of requests, described one request at a time, become one pass.

A request's rows are its tokens at positions [start, start + len(token_ids)), then the nodes of a draft that hangs on
the last of them. Token i is written to the request's slot i; node j of a request with n tokens to its slot n + j.

>>> batch = pack([RequestRows(block_ids=[7], token_ids=[3, 4], start=0)], block_size=16)
>>> batch.positions.tolist(), batch.slot_mapping.tolist(), batch.logits_rows.tolist()
([0, 1], [112, 113], [1])
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.forward import ForwardBatch
from paceline.core.tree import EMPTY_TREE, DraftTree

IntArray = NDArray[np.int32]


@dataclass(slots=True)
class NodePlaces:
    """Nodes that do not all stand behind the request's last token. For teacher forcing: a draft at every position."""

    contexts: Sequence[int]  # the tokens [0, context) of the request come before the node's top ancestor
    slots: Sequence[int]  # of the KV cache, not of the request: where each node is written


@dataclass(slots=True)
class RequestRows:
    """One request's rows of a pass."""

    block_ids: Sequence[int]
    token_ids: Sequence[int]
    start: int  # tokens [0, start) have their KV
    nodes: DraftTree = EMPTY_TREE
    num_wanted: int = 1  # logits of that many last rows
    nodes_at: NodePlaces | None = None  # None: behind the last token, in the request's own slots
    follows: int = -1  # logits row of the pass before, which may still run, that draws the last of token_ids

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + len(self.nodes.token_ids)


def pack(entries: Sequence[RequestRows], block_size: int) -> ForwardBatch:
    """On the host: a decoder brings it to its device, in the way that it does that best."""
    num_rows = sum([entry.num_rows for entry in entries])
    max_blocks = max([len(entry.block_ids) for entry in entries])
    rows = np.empty((6, num_rows), dtype=np.int32)
    token_ids, positions, slots, context_lens, parents, req_ids = rows
    is_node = np.zeros(num_rows, dtype=np.bool_)
    block_tables = np.zeros((len(entries), max_blocks), dtype=np.int32)
    cu_query = np.zeros(len(entries) + 1, dtype=np.int32)
    wanted: list[int] = []
    follows: list[tuple[int, int]] = []
    parents.fill(-1)
    begin = 0
    for i, entry in enumerate(entries):
        num_tokens = entry.start + len(entry.token_ids)
        middle, end = begin + len(entry.token_ids), begin + entry.num_rows
        table = block_tables[i, : len(entry.block_ids)]
        table[:] = entry.block_ids
        req_ids[begin:end] = i
        wanted.extend(range(end - entry.num_wanted, end))
        cu_query[i + 1] = end
        if entry.follows >= 0:
            follows.append((middle - 1, entry.follows))
        if end - begin == 1 and not entry.nodes:  # plain decoding: arrays of one number take ten times as long
            token_ids[begin], positions[begin], context_lens[begin] = entry.token_ids[0], entry.start, num_tokens
            slots[begin] = entry.block_ids[entry.start // block_size] * block_size + entry.start % block_size
            begin = end
            continue
        # [begin, middle) committed tokens
        committed = np.arange(entry.start, num_tokens, dtype=np.int32)
        token_ids[begin:middle] = entry.token_ids
        positions[begin:middle] = committed
        context_lens[begin:middle] = committed + 1
        slots[begin:middle] = _slots(committed, table, block_size)
        # [middle, end) draft nodes
        if entry.nodes:
            token_ids[middle:end] = entry.nodes.token_ids
            node_parents = np.asarray(entry.nodes.parents, dtype=np.int32)
            parents[middle:end] = np.where(node_parents < 0, -1, node_parents + middle)
            is_node[middle:end] = True
            depths = np.asarray(entry.nodes.depths(), dtype=np.int32)
            if entry.nodes_at is None:
                positions[middle:end] = depths + (num_tokens - 1)
                context_lens[middle:end] = num_tokens
                nodes = np.arange(num_tokens, num_tokens + len(entry.nodes), dtype=np.int32)
                slots[middle:end] = _slots(nodes, table, block_size)
            else:
                positions[middle:end] = depths - 1 + np.asarray(entry.nodes_at.contexts, dtype=np.int32)
                context_lens[middle:end] = entry.nodes_at.contexts
                slots[middle:end] = entry.nodes_at.slots
        begin = end
    of_rows = torch.from_numpy(rows).unbind()
    return ForwardBatch(
        token_ids=of_rows[0],
        positions=of_rows[1],
        slot_mapping=of_rows[2],
        context_lens=of_rows[3],
        parents=of_rows[4],
        is_node=torch.from_numpy(is_node),
        req_ids=of_rows[5],
        block_tables=torch.from_numpy(block_tables),
        cu_query=torch.from_numpy(cu_query),
        logits_rows=torch.from_numpy(np.asarray(wanted, dtype=np.int32)),
        block_size=block_size,
        follows=_follows(follows, num_rows) if follows else None,
    )


def _follows(pairs: Sequence[tuple[int, int]], num_rows: int) -> torch.Tensor:
    follows = np.full(num_rows, -1, dtype=np.int32)
    rows, drawn_at = zip(*pairs, strict=True)
    follows[list(rows)] = drawn_at
    return torch.from_numpy(follows)


def _slots(indices: IntArray, table: IntArray, block_size: int) -> IntArray:
    return table[indices // block_size] * np.int32(block_size) + indices % np.int32(block_size)
