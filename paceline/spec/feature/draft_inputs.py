"""What a captured draft reads, and how it gets to the device: one copy of ints from pinned memory.

Every array of the inputs has a fixed place for a number of requests, because a CUDA graph reads from the addresses that
it was captured with. Slots and tokens are int32 on the host and int64 where PyTorch indexes with them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.sent_ints import SentInts

ROW_FIELDS = ("hidden_rows", "slots", "positions", "next_tokens")
REQUEST_FIELDS = ("counts", "table_rows", "begins", "last_positions", "widths", "depths", "num_nodes")
FLOAT_FIELDS = ("lowest", "followed", "scales")


@dataclass(frozen=True, slots=True)
class DraftViews:
    """Tensors on the device, as the draft uses them."""

    hidden: Tensor  # [R * F, layers * hidden]: the target's states of the newest pairs
    slots: Tensor  # [R, F] int64
    positions: Tensor  # [R, F] int64
    next_tokens: Tensor  # [R, F] int64
    counts: Tensor  # [R]: how many of the F pairs there are
    table_rows: Tensor  # [R]: of `table`
    begins: Tensor  # [R]: keys of a request before these pairs
    context_lens: Tensor  # [R] int32: keys of a request, these pairs included
    last_positions: Tensor  # [R]: of the newest pairs
    widths: Tensor  # [R]
    depths: Tensor  # [R]
    num_nodes: Tensor  # [R]
    lowest: Tensor  # [R] float32: log-probability from which a path is kept
    followed: Tensor  # [R] float32: and from which it is extended
    scales: Tensor  # [R] float32: of logits that get noise; 0: none
    noise_keys: Tensor  # [R, L, 2] int32: low and high half of the noise's name at each level
    table: Tensor  # [rows, positions] int32: slots of each request's keys, in order
    id_constants: Tensor | None  # [draft vocab] int32: what noise is made from; None: no request has noise


class DraftInputs:
    """The ints of a draft of `num_requests`, on the host and on the device."""

    def __init__(self, num_requests: int, num_pairs: int, num_levels: int, device: torch.device) -> None:
        self.num_requests, self.num_pairs, self.num_levels = num_requests, num_pairs, num_levels
        num_ints = num_requests * (
            len(ROW_FIELDS) * num_pairs + len(REQUEST_FIELDS) + len(FLOAT_FIELDS) + 2 * num_levels
        )
        self._sent = SentInts(num_ints, device)
        self._arrays = [{name: part.numpy() for name, part in self._fields(host).items()} for host in self._sent.hosts]
        self.hidden_rows = self._fields(self._sent.device_ints)["hidden_rows"].flatten()
        """[R * F] int32: which row of the pass each pair is made of."""

    def host(self) -> dict[str, NDArray[np.int32]]:
        """Arrays of zeros to be written, by name; then `send`."""
        free = self._sent.free()
        self._sent.hosts[free].zero_()
        return self._arrays[free]

    def send(self) -> None:
        self._sent.send()

    def views(self, hidden: Tensor, table: Tensor, id_constants: Tensor | None) -> DraftViews:
        """The copies that have another type are made here, so as a part of the graph."""
        fields = self._fields(self._sent.device_ints)
        ints = self._sent.device_ints.long()
        wide = {name: part for name, part in self._fields(ints).items() if name not in (*FLOAT_FIELDS, "hidden_rows")}
        floats = {name: fields[name].view(torch.float32) for name in FLOAT_FIELDS}
        context_lens = fields["begins"] + fields["counts"]
        named = wide | floats | {"noise_keys": fields["noise_keys"], "context_lens": context_lens}
        return DraftViews(hidden=hidden, table=table, id_constants=id_constants, **named)

    def _fields(self, ints: Tensor) -> dict[str, Tensor]:
        count, found, begin = self.num_requests, {}, 0
        sizes = dict.fromkeys(ROW_FIELDS, (count, self.num_pairs))
        for name, shape in (
            *sizes.items(),
            *((name, (count,)) for name in (*REQUEST_FIELDS, *FLOAT_FIELDS)),
            ("noise_keys", (count, self.num_levels, 2)),
        ):
            end = begin + int(np.prod(shape))
            found[name] = ints[begin:end].view(shape)
            begin = end
        return found
