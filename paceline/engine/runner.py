"""Runs the target on what the scheduler chose, in one pass (`core/packing.py` makes the batch).

Rows of a request: its committed tokens without KV, then the nodes of its draft. Logits are computed only for rows that
somebody reads: the last token's and the nodes' (and every prompt row where prompt log-probabilities were asked for).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.core.forward import Decoder
from paceline.core.packing import RequestRows, pack
from paceline.engine.scheduler import ScheduledRequest


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
        entries = [_rows(entry) for entry in scheduled]
        batch = pack(entries, self.block_size, self.model.device)
        output = self.model.forward(batch, self.kv_cache, hidden_layers=hidden_layers)
        ends = np.cumsum([entry.num_wanted for entry in entries]).tolist()
        first_rows = np.cumsum([0, *(entry.num_rows for entry in entries)]).tolist()
        return PassOutput(
            output.logits,
            output.hidden,
            tuple(hidden_layers),
            first_rows[:-1],
            [range(end - entry.num_wanted, end) for end, entry in zip(ends, entries, strict=True)],
        )


def _rows(entry: ScheduledRequest) -> RequestRows:
    request, end = entry.request, entry.start + entry.num_committed
    return RequestRows(
        request.block_ids, request.token_ids[entry.start : end], entry.start, entry.draft, _num_wanted(entry)
    )


def _num_wanted(entry: ScheduledRequest) -> int:
    """How many of the last rows have logits that somebody reads."""
    if entry.request.prompt_logprobs is not None and entry.start < entry.request.num_prompt_tokens:
        return entry.num_rows
    return 1 + len(entry.draft) if entry.reaches_end else 0
