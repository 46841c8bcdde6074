"""Packs what the scheduler chose into one ragged batch and runs the target on it.

Rows of a request: its committed tokens without KV, then the nodes of its draft. Logits are computed only for rows that
somebody reads: the last token's and the nodes' (and every prompt row where prompt log-probabilities were asked for).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import Decoder, ForwardBatch
from paceline.engine.scheduler import ScheduledRequest

IntArray = NDArray[np.int32]


@dataclass(slots=True)
class PassOutput:
    """A pass's results, and which of its rows belong to whom."""

    logits: Tensor  # [logits rows, vocab] float32
    hidden: Tensor | None  # [rows, len(hidden_layers), hidden size]
    hidden_layers: tuple[int, ...]
    first_rows: list[int]  # of each scheduled request, in the pass
    logits_rows: list[range]  # of each scheduled request, in `logits`: its prompt rows where asked for, root, nodes


class ModelRunner:
    def __init__(self, model: Decoder, kv_cache: Tensor, block_size: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = block_size

    def execute(self, scheduled: Sequence[ScheduledRequest], hidden_layers: Sequence[int] = ()) -> PassOutput:
        logits_rows = [self._wanted_rows(entry) for entry in scheduled]
        batch = pack(scheduled, logits_rows, self.block_size, self.model.device)
        output = self.model.forward(batch, self.kv_cache, hidden_layers=hidden_layers)
        ends = np.cumsum([len(rows) for rows in logits_rows]).tolist()
        first_rows = np.cumsum([0, *(entry.num_rows for entry in scheduled)]).tolist()
        return PassOutput(
            output.logits,
            output.hidden,
            tuple(hidden_layers),
            first_rows[:-1],
            [range(end - len(rows), end) for end, rows in zip(ends, logits_rows, strict=True)],
        )

    @staticmethod
    def _wanted_rows(entry: ScheduledRequest) -> range:
        """Rows, counted from the request's first one, whose logits are read."""
        if entry.request.prompt_logprobs is not None and entry.start < entry.request.num_prompt_tokens:
            return range(entry.num_rows)
        first = entry.num_committed - 1 if entry.reaches_end else entry.num_rows
        return range(first, entry.num_rows)


def pack(
    scheduled: Sequence[ScheduledRequest],
    logits_rows: Sequence[range],
    block_size: int,
    device: torch.device,
) -> ForwardBatch:
    num_rows = sum(entry.num_rows for entry in scheduled)
    max_blocks = max(len(entry.request.block_ids) for entry in scheduled)
    rows = np.empty((7, num_rows), dtype=np.int32)
    token_ids, positions, slots, context_lens, parents, is_node, req_ids = rows
    block_tables = np.zeros((len(scheduled), max_blocks), dtype=np.int32)
    cu_query = np.zeros(len(scheduled) + 1, dtype=np.int32)
    wanted: list[int] = []
    parents.fill(-1)
    is_node.fill(0)
    begin = 0
    for i, entry in enumerate(scheduled):
        request, draft = entry.request, entry.draft
        middle, end = begin + entry.num_committed, begin + entry.num_rows
        table = block_tables[i, : len(request.block_ids)]
        table[:] = request.block_ids
        committed = np.arange(entry.start, entry.start + entry.num_committed, dtype=np.int32)
        # [begin, middle) committed tokens
        token_ids[begin:middle] = request.token_ids[entry.start : entry.start + entry.num_committed]
        positions[begin:middle] = committed
        context_lens[begin:middle] = committed + 1
        slots[begin:middle] = _slots(committed, table, block_size)
        # [middle, end) draft nodes
        if draft:
            num_tokens = request.num_tokens
            token_ids[middle:end] = draft.token_ids
            positions[middle:end] = np.asarray(draft.depths(), dtype=np.int32) + (num_tokens - 1)
            context_lens[middle:end] = num_tokens
            node_parents = np.asarray(draft.parents, dtype=np.int32)
            parents[middle:end] = np.where(node_parents < 0, -1, node_parents + middle)
            is_node[middle:end] = 1
            nodes = np.arange(num_tokens, num_tokens + len(draft), dtype=np.int32)
            slots[middle:end] = _slots(nodes, table, block_size)
        req_ids[begin:end] = i
        wanted.extend(range(begin + logits_rows[i].start, begin + logits_rows[i].stop))
        cu_query[i + 1] = end
        begin = end

    def tensor(values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(device)

    on_device = tensor(rows)
    return ForwardBatch(
        token_ids=on_device[0],
        positions=on_device[1],
        slot_mapping=on_device[2],
        context_lens=on_device[3],
        parents=on_device[4],
        is_node=on_device[5].bool(),
        req_ids=on_device[6],
        block_tables=tensor(block_tables),
        cu_query=tensor(cu_query),
        logits_rows=tensor(np.asarray(wanted, dtype=np.int32)),
        block_size=block_size,
    )


def _slots(indices: IntArray, table: IntArray, block_size: int) -> IntArray:
    return table[indices // block_size] * np.int32(block_size) + indices % np.int32(block_size)
