"""A pass of fixed size: the batch is padded to it, and everything lies where the last pass of that size had it.

A CUDA graph reads its inputs from addresses that were fixed when it was captured. So all arrays of a `ForwardBatch`,
and what is drawn, lie side by side in one buffer on the device, which one copy fills (sent_ints.py). Block tables
come last, so that only those of the requests in the pass are copied.

    inputs = StaticInputs(room, device)
    views = inputs.views(size)  # device tensors, the same for every pass of this size
    inputs.write(batch, size)

A padding row has slot -1 (it writes no keys), an empty context (it reads none), and nobody looks at its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.models.sent_ints import SentInts


@dataclass(frozen=True, slots=True)
class PassRoom:
    """What the passes of an engine have in common."""

    kv_cache: Tensor  # [layers, 2, slots, kv heads, head dim]
    block_size: int
    max_blocks: int  # of one request
    max_num_seqs: int
    max_rows: int = 1024  # of a pass


@dataclass(frozen=True, slots=True)
class InputViews:
    """The inputs of a pass of `size` rows, as tensors on the device."""

    size: int
    counts: Tensor  # [3] int32: rows, requests and logits rows that are not padding
    token_ids: Tensor  # [size] int32, as all of these
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    parents: Tensor
    is_node: Tensor  # 0 or 1
    req_ids: Tensor
    follows: Tensor  # logits row of the pass before whose token this row takes; -1: token_ids has it
    logits_rows: Tensor  # [size]; padding: row 0
    draw_positions: Tensor  # [size]
    temperatures: Tensor  # [size] float32
    seeds: Tensor  # [size] int64
    block_tables: Tensor  # [max_num_seqs, max_blocks] int32
    picked: Tensor  # [2, at least size] int32: written by the pass, see `read_tokens`
    drawn_before: Tensor  # [any] int32: tokens of the pass before, whatever its size, until this one writes `picked`

    def fill_with_padding(self) -> None:
        """A pass that reads no keys and writes none."""
        rows = (self.token_ids, self.positions, self.slots, self.context_lens, self.parents, self.is_node, self.req_ids)
        others = (self.follows, self.logits_rows, self.draw_positions, self.temperatures)
        for array, padding in zip((*rows, *others), ROW_PADDING, strict=True):
            array.fill_(padding)
        self.seeds.zero_()
        self.counts.zero_()


NUM_ROW_ARRAYS = 11  # token_ids to temperatures above, in that order
ROW_PADDING = (0, 0, -1, 0, -1, 0, 0, -1, 0, 0, 0)
NO_ROWS = torch.empty(0, dtype=torch.int32)
MAX_SENT_ALONE = 16  # entries of block tables, at 5 us each: more are sent with the whole tables
HEADER = 4  # ints: the counts, and one that keeps what follows at multiples of 16 bytes


def aligned(size: int) -> int:
    """Ints from one array to the next: a multiple of 16 bytes, so that every size runs the same compiled kernels."""
    return -(-size // 4) * 4


def tables_begin(size: int) -> int:
    """Where the block tables begin: after the header, the seeds (two ints each) and the row arrays."""
    return HEADER + (2 + NUM_ROW_ARRAYS) * aligned(size)


class StaticInputs:
    def __init__(self, room: PassRoom, max_size: int, device: torch.device) -> None:
        self.room = room
        self._sent = SentInts(tables_begin(max_size) + room.max_num_seqs * room.max_blocks, device)
        self._picked = torch.zeros(2 * aligned(max_size), dtype=torch.int32, device=device)

    def views(self, size: int) -> InputViews:
        buffer, room = self._sent.device_ints, self.room
        begin, end = HEADER + 2 * aligned(size), tables_begin(size)
        arrays = buffer[begin:end].view(NUM_ROW_ARRAYS, -1)[:, :size]
        token_ids, positions, slots, context_lens, parents, is_node, req_ids, follows, logits_rows, at, heat = arrays
        return InputViews(
            size=size,
            counts=buffer[:3],
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            context_lens=context_lens,
            parents=parents,
            is_node=is_node,
            req_ids=req_ids,
            follows=follows,
            logits_rows=logits_rows,
            draw_positions=at,
            temperatures=heat.view(torch.float32),
            seeds=buffer[HEADER:begin].view(torch.int64)[:size],
            block_tables=buffer[end : end + room.max_num_seqs * room.max_blocks].view(-1, room.max_blocks),
            picked=self._picked[: 2 * aligned(size)].view(2, -1),
            drawn_before=self._picked,
        )

    def write(self, batch: ForwardBatch, size: int) -> None:
        """Pad the batch, which lies on the host, and send it to the device: when this returns the batch is free."""
        host = self._sent.hosts[self._sent.free()]
        self._sent.send(pad(batch, size, self.room.max_blocks, host.numpy()))

    def write_tables(self, tables: NDArray[np.int32], size: int, grown: Sequence[tuple[int, int]] = ()) -> None:
        """Only the block tables of a pass whose other inputs are there: [requests, max_blocks]. `grown`: where alone
        they have changed, if that is known."""
        host = self._sent.hosts[self._sent.free()].numpy()
        begin = tables_begin(size)
        if 0 < len(grown) <= MAX_SENT_ALONE:
            places = [begin + request * tables.shape[1] + block for request, block in grown]
            for place, at in zip(places, grown, strict=True):
                host[place] = tables[at]
            self._sent.send_each(places)
            return
        host[begin : begin + tables.size] = tables.reshape(-1)
        self._sent.send(begin + tables.size, begin)


def pad(batch: ForwardBatch, size: int, max_blocks: int, host: NDArray[np.int32]) -> int:
    """Write the batch, padded to `size` rows, to the front of `host`; returns how many ints that took."""
    num_rows, num_logits = batch.num_rows, batch.logits_rows.shape[0]
    num_requests, width = batch.block_tables.shape
    host[0], host[1], host[2] = num_rows, num_requests, num_logits
    begin, end = HEADER + 2 * aligned(size), tables_begin(size)
    seeds = host[HEADER:begin].view(np.int64)
    rows = host[begin:end].reshape(NUM_ROW_ARRAYS, -1)
    own = (
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.context_lens,
        batch.parents,
        batch.is_node,
        batch.req_ids,
        NO_ROWS if batch.follows is None else batch.follows,
        batch.logits_rows,
    )
    for array, values, padding in zip(rows, own, ROW_PADDING, strict=False):
        count = values.shape[0]
        array[:count] = values.numpy()
        array[count:] = padding
    draws = batch.draws
    rows[9:] = 0  # no draws, or padding: the likeliest token
    seeds[:] = 0
    if draws is not None:
        rows[9, :num_logits] = draws.positions
        rows[10, :num_logits] = draws.temperatures.view(np.int32)
        seeds[:num_logits] = draws.seeds
    tables = host[end : end + num_requests * max_blocks].reshape(num_requests, max_blocks)
    tables[:, :width] = batch.block_tables.numpy()  # what lies behind is never read
    return end + num_requests * max_blocks


def tokens_of_rows(token_ids: Tensor, follows: Tensor, drawn: Tensor, vocab_size: int) -> Tensor:
    """Each row's token: its own, or where `follows` says so one of those drawn before (as ops/triton/embed.py)."""
    return torch.where(follows >= 0, drawn[follows.clamp(min=0)].clamp(0, vocab_size - 1), token_ids)


def read_tokens(picked: Tensor) -> list[int | None]:  # [2, rows] int32 on the host: tokens, and the bits of scores
    """A row's token; None where its score is not finite, so that it cannot be sampled."""
    tokens: list[int | None] = picked[0].tolist()
    usable = torch.isfinite(picked[1].view(torch.float32))
    if not bool(usable.all()):
        return [token if ok else None for token, ok in zip(tokens, usable.tolist(), strict=True)]
    return tokens
