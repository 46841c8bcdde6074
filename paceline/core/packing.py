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

from paceline.core.forward import ForwardBatch, TokenDraws
from paceline.core.tree import EMPTY_TREE, DraftTree

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

FEW_ROWS = 128  # of a pass, that are packed in plain Python


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


def pack(
    entries: Sequence[RequestRows], block_size: int, draws: TokenDraws | None = None, *, wants_logits: bool = True
) -> ForwardBatch:
    """On the host: a decoder brings it to its device, in the way that it does that best."""
    num_rows = sum([entry.num_rows for entry in entries])
    max_blocks = max([len(entry.block_ids) for entry in entries])
    block_tables = np.zeros((len(entries), max_blocks), dtype=np.int32)
    begins = [0]
    wanted: list[int] = []
    follows: list[tuple[int, int]] = []
    for i, entry in enumerate(entries):
        end = begins[-1] + entry.num_rows
        block_tables[i, : len(entry.block_ids)] = entry.block_ids
        wanted.extend(range(end - entry.num_wanted, end))
        if entry.follows >= 0:
            follows.append((begins[-1] + len(entry.token_ids) - 1, entry.follows))
        begins.append(end)
    if num_rows <= FEW_ROWS:
        rows, is_node = _few_rows(entries, begins, block_size)
    else:
        rows, is_node = _many_rows(entries, begins, block_tables, block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(rows[0]),
        positions=torch.from_numpy(rows[1]),
        slot_mapping=torch.from_numpy(rows[2]),
        context_lens=torch.from_numpy(rows[3]),
        parents=torch.from_numpy(rows[4]),
        is_node=torch.from_numpy(is_node),
        req_ids=torch.from_numpy(rows[5]),
        block_tables=torch.from_numpy(block_tables),
        cu_query=torch.from_numpy(np.array(begins, dtype=np.int32)),
        logits_rows=torch.from_numpy(np.array(wanted, dtype=np.int32)),
        block_size=block_size,
        draws=draws,
        wants_logits=wants_logits,
        follows=_follows(follows, num_rows) if follows else None,
    )


def _few_rows(entries: Sequence[RequestRows], begins: Sequence[int], block_size: int) -> tuple[IntArray, BoolArray]:
    """The same as `_many_rows`, in plain Python: right after a pass no code is in the caches, and then the first call
    of each of numpy's functions takes 15 us."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    context_lens: list[int] = []
    parents: list[int] = []
    req_ids: list[int] = []
    is_node: list[bool] = []
    for i, (entry, begin) in enumerate(zip(entries, begins, strict=False)):
        blocks, nodes, num_committed = entry.block_ids, entry.nodes.token_ids, len(entry.token_ids)
        num_tokens, count = entry.start + num_committed, num_committed + len(nodes)
        token_ids += entry.token_ids
        for at in range(entry.start, num_tokens):
            positions.append(at)
            context_lens.append(at + 1)
            slots.append(blocks[at // block_size] * block_size + at % block_size)
        parents += [-1] * num_committed
        req_ids += [i] * count
        is_node += [False] * num_committed
        if not nodes:
            continue
        middle, depths = begin + num_committed, entry.nodes.depths()
        token_ids += nodes
        parents += [-1 if parent < 0 else parent + middle for parent in entry.nodes.parents]
        is_node += [True] * len(nodes)
        if entry.nodes_at is None:
            positions += [num_tokens - 1 + depth for depth in depths]
            context_lens += [num_tokens] * len(nodes)
            ends = range(num_tokens, num_tokens + len(nodes))
            slots += [blocks[at // block_size] * block_size + at % block_size for at in ends]
        else:
            positions += [depth - 1 + int(base) for depth, base in zip(depths, entry.nodes_at.contexts, strict=True)]
            context_lens += entry.nodes_at.contexts
            slots += entry.nodes_at.slots
    rows = np.array([token_ids, positions, slots, context_lens, parents, req_ids], dtype=np.int32)
    return rows, np.array(is_node, dtype=np.bool_)


def _many_rows(
    entries: Sequence[RequestRows], begins: Sequence[int], block_tables: IntArray, block_size: int
) -> tuple[IntArray, BoolArray]:
    """[token ids, positions, slots, context lengths, parents, request ids] of all rows, and which are nodes."""
    rows = np.empty((6, begins[-1]), dtype=np.int32)
    token_ids, positions, slots, context_lens, parents, req_ids = rows
    is_node = np.zeros(begins[-1], dtype=np.bool_)
    parents.fill(-1)
    for i, (entry, begin, end) in enumerate(zip(entries, begins, begins[1:], strict=False)):
        num_tokens, middle = entry.start + len(entry.token_ids), begin + len(entry.token_ids)
        table = block_tables[i, : len(entry.block_ids)]
        req_ids[begin:end] = i
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
    return rows, is_node


def _follows(pairs: Sequence[tuple[int, int]], num_rows: int) -> torch.Tensor:
    follows = np.full(num_rows, -1, dtype=np.int32)
    rows, drawn_at = zip(*pairs, strict=True)
    follows[list(rows)] = drawn_at
    return torch.from_numpy(follows)


def _slots(indices: IntArray, table: IntArray, block_size: int) -> IntArray:
    return table[indices // block_size] * np.int32(block_size) + indices % np.int32(block_size)
