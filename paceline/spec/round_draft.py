"""A drafter's part of rounds on the device (captured_rounds.py).

    begin    told which requests go on in rounds, from the host: what it keeps of each on the device is there by then
    walked   where the walk writes what was accepted of the last pass
    draft    takes that in, and drafts the next trees; kernels only, so that a CUDA graph can hold them

The walk, the keys and values of accepted rows, and the rows of the next pass are the same for all drafters.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.ops.rounds import NamedPairs, RoundState
from paceline.spec.rounds import RoundSize


class RoundRoom(NamedTuple):
    """The most that the rounds of a drafter ever hold."""

    max_requests: int
    num_nodes: int  # of a tree
    num_levels: int

    @property
    def num_pairs(self) -> int:
        """Rows of a request that a pass may accept: its last token's and one for each level."""
        return 1 + self.num_levels


class Walked(NamedTuple):
    """Where the walk writes: the newest pairs of each request, its newest last, and the rows that they come from."""

    pairs: NamedPairs
    hidden_rows: Tensor  # [R * F] int32: rows of the pass


class RoundDraft(Protocol):
    @property
    def room(self) -> RoundRoom: ...

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...  # which hidden states passes leave for it

    def begin(self, size: RoundSize, requests: Sequence[Request]) -> bool:
        """These go on in rounds of this size, in that order; none: only padding runs. False, and nothing is changed,
        where it cannot draft for one of them there, or does not know enough of it."""
        ...

    def walked(self, size: RoundSize) -> Walked: ...

    def draft(self, size: RoundSize, state: RoundState, hidden: Tensor | None) -> Tensor:
        """The next trees after the walk, [R, 1 + 3 * K] int32 as tree_answers.py reads them, at the same address for
        every call with this size. `hidden`: of the pass that was walked, [rows, layers, hidden]."""
        ...


class WalkedPairs(NamedTuple):
    """Room for walks, for drafters that have none of their own. All but the noise's names in one record each."""

    slots: Tensor  # [R, F] int32, as all of these
    positions: Tensor
    next_tokens: Tensor
    counts: Tensor  # [R]
    context_lens: Tensor  # [R]: not used
    noise_keys: Tensor  # [R, 1, 2]: not used


class WalkedRoom:
    def __init__(self, room: RoundRoom, device: torch.device) -> None:
        pairs = self._num_pairs = room.num_pairs
        self._records = torch.zeros(room.max_requests, 3 * pairs + 4, dtype=torch.int32, device=device)
        self._hidden_rows = torch.zeros(room.max_requests * pairs, dtype=torch.int32, device=device)

    def walked(self, num_requests: int) -> Walked:
        records, pairs = self._records[:num_requests], self._num_pairs
        slots, positions, next_tokens = (records[:, i * pairs : (i + 1) * pairs] for i in range(3))
        counts, context_lens = records[:, 3 * pairs], records[:, 3 * pairs + 1]
        keys = records[:, 3 * pairs + 2 :].view(num_requests, 1, 2)
        found = WalkedPairs(slots, positions, next_tokens, counts, context_lens, keys)
        return Walked(found, self._hidden_rows[: num_requests * pairs])
