"""The target's hidden states on their way into a drafter's KV.

Every pass of the target yields features of the tokens that are now committed, whether they are drafted for or not. They
are queued with the slots that their tokens have at that moment (also of a request that has just ended: others may find
its blocks in the prefix cache), and a drafter takes them all, in order, before it drafts or when there are many. So
nothing is kept per request: a slot that was given to another request meanwhile is written again by the rows of its new
owner, which stand later in the queue; and a prefix that another request finds in the cache brings the drafter's keys
along, in the same slots.

While a drafter is skipped it is told of no pass, and the target does not keep its hidden states. What it took in before
stays valid until its block is handed out again. Above all this is the beginning of a prompt that many requests share:
without it far fewer drafts are accepted. So for every slot the use of its block is noted in which its feature was taken
in, and a context is the part of a request's tokens whose features were taken in during the present use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import Request
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import RequestPass, StepContext

IntArray = NDArray[np.int32]

FLUSH_ROWS = 64  # features that wait, at most, while nothing is drafted


@dataclass(frozen=True, slots=True)
class FeatureRows:
    features: Tensor  # [rows, layers, hidden]
    positions: IntArray  # [rows]
    slots: IntArray  # [rows]
    next_tokens: IntArray  # [rows]: the token after each row's, known by now
    uses: IntArray  # [rows]: how many times the row's block had been handed out
    last_rows: dict[str, int]  # request id -> its newest row

    def __len__(self) -> int:
        return len(self.positions)


class FeatureQueue:
    def __init__(self, hidden_layers: Sequence[int], services: EngineParts) -> None:
        self._layers, self._services = tuple(hidden_layers), services
        self._parts: list[FeatureRows] = []
        self._heard = np.zeros(services.num_slots, dtype=np.int32)  # [slots]: in which use of its block; 0: never
        self._block_uses: IntArray | None = None  # [blocks]: times that each was handed out, up to date

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, step: StepContext) -> None:
        if step.hidden is None:
            return
        assert step.block_uses is not None, "a step with hidden states says whose blocks are whose"
        self._block_uses = step.block_uses
        columns = [step.hidden_layers.index(layer) for layer in self._layers]
        wanted = slice(None) if columns == list(range(step.hidden.shape[1])) else columns
        for verified in step.passes:
            if verified.block_ids and verified.request.error is None:
                self._parts.append(self._rows(verified, step.hidden, wanted))

    def follow(self, step: StepContext, flush: Callable[[], None]) -> bool:
        """Queue a step's features and have them taken in where they must not wait; False where there are none.

        The blocks of a request that has ended may belong to another in this very step: one slot, one row in a call."""
        if step.hidden is None:
            self._parts.clear()
            return False
        if step.gone:
            flush()
        self.add(step)
        if step.gone or len(self) > FLUSH_ROWS:
            flush()
        return True

    def context(self, request: Request) -> IntArray:
        """The slots of a request's tokens that have keys, in order; the last token has none yet."""
        slots = block_slots(request.block_ids, request.num_tokens - 1, self._services.block_size)
        has_keys = self._heard[slots] == self._uses(slots)
        return slots if has_keys.all() else slots[has_keys]

    def take(self) -> FeatureRows | None:
        """Everything queued, oldest first."""
        if not self._parts:
            return None
        parts, self._parts = self._parts, []
        last_rows: dict[str, int] = {}
        begin = 0
        for part in parts:
            last_rows |= {name: begin + row for name, row in part.last_rows.items()}
            begin += len(part)
        if len(parts) == 1:
            queued = parts[0]
        else:
            queued = FeatureRows(
                torch.cat([part.features for part in parts]),
                np.concatenate([part.positions for part in parts]),
                np.concatenate([part.slots for part in parts]),
                np.concatenate([part.next_tokens for part in parts]),
                np.concatenate([part.uses for part in parts]),
                last_rows,
            )
        self._heard[queued.slots] = queued.uses
        return queued

    def _uses(self, slots: IntArray) -> IntArray:
        assert self._block_uses is not None
        uses: IntArray = self._block_uses[slots // np.int32(self._services.block_size)]
        return uses

    def _rows(self, verified: RequestPass, hidden: Tensor, columns: slice | list[int]) -> FeatureRows:
        request, first = verified.request, verified.rows.start
        rows = list(range(first, first + verified.num_committed))
        rows += [first + verified.num_committed + node for node in verified.accepted]
        # A request may have ended inside the accepted path; after its last token there is no next one.
        rows = rows[: request.num_tokens - 1 - verified.start]
        begin, end = verified.start, verified.start + len(rows)
        is_stretch = not rows or rows[-1] == first + len(rows) - 1
        chosen = hidden[first : first + len(rows)] if is_stretch else take_rows(hidden, rows)
        slots = block_slots(verified.block_ids, end, self._services.block_size)[begin:]
        return FeatureRows(
            chosen[:, columns],
            np.arange(begin, end, dtype=np.int32),
            slots,
            np.asarray(request.token_ids[begin + 1 : end + 1], dtype=np.int32),
            self._uses(slots),
            {request.request_id: len(rows) - 1},
        )


def take_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows], copied. On a CPU by numpy: PyTorch would start its threads for a few kilobytes."""
    if x.device.type == "cpu" and x.dtype != torch.bfloat16:
        return torch.from_numpy(x.numpy()[list(rows)])
    return x[list(rows)]


def block_slots(block_ids: Sequence[int], num_tokens: int, block_size: int) -> IntArray:
    """The slots of the first tokens in these blocks: [num_tokens]"""
    blocks = np.asarray(block_ids[: -(-num_tokens // block_size)], dtype=np.int32)
    slots = np.add.outer(blocks * np.int32(block_size), np.arange(block_size, dtype=np.int32), dtype=np.int32)
    return np.asarray(slots, dtype=np.int32).reshape(-1)[:num_tokens]
