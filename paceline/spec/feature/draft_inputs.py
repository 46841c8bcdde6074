"""What a draft on a device reads, and how it gets there: one copy of ints from pinned memory.

For a number of requests every array has a fixed place, because a CUDA graph reads from the addresses that it was
captured with: first which rows of the pass the newest pairs are made of, then one record of ints per request.

The newest pairs of a request stand at the end of its F places, so that the last place always has the newest one.
Padding, of pairs and of requests, has slot -1 and writes nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.sent_ints import SentInts
from paceline.models.static_inputs import aligned

Ints = NDArray[np.int32]
PAIR_FIELDS = ("slots", "positions", "next_tokens")  # F ints each, in this order at the front of a record


class RequestInts(NamedTuple):
    """They follow the pairs."""

    counts: int
    table_rows: int
    context_lens: int
    widths: int
    depths: int
    num_nodes: int


REQUEST_FIELDS = RequestInts._fields
FLOAT_FIELDS = ("lowest", "followed", "scales")  # and these follow them


@dataclass(frozen=True, slots=True)
class DraftViews:
    """Tensors on the device. Those of requests have the same stride from request to request."""

    hidden: Tensor  # [R * F, layers * hidden]: the target's states of the newest pairs
    slots: Tensor  # [R, F] int32; -1: no pair
    positions: Tensor  # [R, F] int32
    next_tokens: Tensor  # [R, F] int32
    counts: Tensor  # [R] int32: how many of the F places hold pairs
    table_rows: Tensor  # [R] int32: of `table`
    context_lens: Tensor  # [R] int32: keys of a request, these pairs included
    widths: Tensor  # [R] int32
    depths: Tensor  # [R] int32
    num_nodes: Tensor  # [R] int32
    lowest: Tensor  # [R] float32: log-probability from which a path is kept
    followed: Tensor  # [R] float32: and from which it is extended
    scales: Tensor  # [R] float32: of logits that get noise; 0: none
    noise_keys: Tensor  # [R, L, 2] int32: low and high half of the noise's name at each level
    table: Tensor  # [rows, positions] int32: slots of each request's keys, in order
    id_constants: Tensor  # [draft vocab] int32: what noise is made from

    @property
    def last_positions(self) -> Tensor:
        """[R] int32: of the newest pairs"""
        return self.positions[:, -1]


@dataclass(frozen=True, slots=True)
class HostFields:
    """The ints of a number of requests, to be written."""

    hidden_rows: Ints  # [R, F]
    records: Ints  # [R, ints of a record]
    num_pairs: int

    def pairs(self, name: str) -> Ints:
        """[R, F]"""
        begin = PAIR_FIELDS.index(name) * self.num_pairs
        return self.records[:, begin : begin + self.num_pairs]

    def requests(self) -> Ints:
        """[R, len(RequestInts)]"""
        first = len(PAIR_FIELDS) * self.num_pairs
        return self.records[:, first : first + len(REQUEST_FIELDS)]

    def floats(self, name: str) -> NDArray[np.float32]:
        """[R]"""
        first = len(PAIR_FIELDS) * self.num_pairs + len(REQUEST_FIELDS)
        return self.records[:, first + FLOAT_FIELDS.index(name)].view(np.float32)

    def noise_keys(self) -> Ints:
        """[R, 2 * L]"""
        return self.records[:, len(PAIR_FIELDS) * self.num_pairs + len(REQUEST_FIELDS) + len(FLOAT_FIELDS) :]


class DraftInputs:
    """The ints of drafts of up to `max_requests`, on the host and on the device."""

    def __init__(self, max_requests: int, num_pairs: int, num_levels: int, device: torch.device) -> None:
        self.num_pairs, self.num_levels = num_pairs, num_levels
        fields = len(PAIR_FIELDS) * num_pairs + len(REQUEST_FIELDS) + len(FLOAT_FIELDS) + 2 * num_levels
        self._record = aligned(fields)
        self._sent = SentInts(aligned(max_requests * num_pairs) + max_requests * self._record, device)
        self._known: dict[tuple[int, int], HostFields] = {}

    def host(self, num_requests: int) -> HostFields:
        """Everything of padding, and to be written for the requests that there are; then `send`."""
        free = self._sent.free()
        fields = self._known.get((num_requests, free))
        if fields is None:
            ints = self._sent.hosts[free].numpy()
            begin = self._begin(num_requests)
            rows = ints[: num_requests * self.num_pairs].reshape(num_requests, -1)
            records = ints[begin : begin + num_requests * self._record].reshape(num_requests, -1)
            fields = self._known[num_requests, free] = HostFields(rows, records, self.num_pairs)
        fields.hidden_rows.fill(0)
        fields.records.fill(0)
        fields.pairs("slots").fill(-1)
        return fields

    def send(self, num_requests: int) -> None:
        self._sent.send(self._begin(num_requests) + num_requests * self._record)

    def hidden_rows(self, num_requests: int) -> Tensor:
        """[R * F] int32, on the device: which row of the pass each pair is made of."""
        return self._sent.device_ints[: num_requests * self.num_pairs]

    def views(self, num_requests: int, hidden: Tensor, table: Tensor, id_constants: Tensor) -> DraftViews:
        begin, pairs = self._begin(num_requests), self.num_pairs
        ints = self._sent.device_ints[begin : begin + num_requests * self._record].view(num_requests, -1)
        named: dict[str, Tensor] = {}
        for i, name in enumerate(PAIR_FIELDS):
            named[name] = ints[:, i * pairs : (i + 1) * pairs]
        first = len(PAIR_FIELDS) * pairs
        for i, name in enumerate((*REQUEST_FIELDS, *FLOAT_FIELDS), first):
            named[name] = ints[:, i].view(torch.float32) if name in FLOAT_FIELDS else ints[:, i]
        last = first + len(REQUEST_FIELDS) + len(FLOAT_FIELDS)
        keys = ints[:, last : last + 2 * self.num_levels].view(num_requests, -1, 2)
        return DraftViews(hidden=hidden, table=table, id_constants=id_constants, noise_keys=keys, **named)

    def _begin(self, num_requests: int) -> int:
        """Where the records begin."""
        return aligned(num_requests * self.num_pairs)
