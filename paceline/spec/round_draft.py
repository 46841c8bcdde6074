"""A drafter's part of rounds on the device (captured_rounds.py).

    begin    told which requests go on in rounds, from the host: what it keeps of each on the device is there by then
    walked   where the walk writes what was accepted of the last pass
    draft    takes that in, and drafts the next trees; kernels only, so that a CUDA graph can hold them

The walk, the keys and values of accepted rows, and the rows of the next pass are the same for all drafters.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import Request
from paceline.models.static_inputs import aligned
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
    """[R, F] or [R] int32"""

    slots: Tensor
    positions: Tensor
    next_tokens: Tensor
    counts: Tensor
    context_lens: Tensor  # not used
    noise_keys: Tensor  # [R, L, 2]


class WalkNoise(NamedTuple):
    """The target's noise at the next positions of each request."""

    scales: Tensor  # [R] float32: of logits that get noise; 0: none
    noise_keys: Tensor  # [R, L, 2] int32, with the stride of scales
    id_constants: Tensor  # [vocab] int32: what noise is made from


class WalkedRoom:
    """Room for walks, for drafters that have none of their own: one record of ints for each request."""

    def __init__(self, room: RoundRoom, device: torch.device, id_constants: NDArray[np.uint32] | None = None) -> None:
        """`id_constants`: of the drafter's vocabulary, where its guesses get the target's noise."""
        self._num_pairs = room.num_pairs
        self._num_levels = 1 if id_constants is None else room.num_levels
        record = aligned(3 * room.num_pairs + 3 + 2 * self._num_levels)
        self._records = torch.zeros(room.max_requests, record, dtype=torch.int32, device=device)
        self._hidden_rows = torch.zeros(room.max_requests * room.num_pairs, dtype=torch.int32, device=device)
        constants = np.zeros(0, dtype=np.int32) if id_constants is None else id_constants.view(np.int32).copy()
        self._id_constants = torch.from_numpy(constants).to(device)

    def begin(self, scales: Tensor) -> None:
        """Other requests from now on. `scales`: [max_requests] float32."""
        self._hidden_rows.zero_()  # a row of an earlier, larger pass may not be there
        self._scales.copy_(scales)

    @property
    def _scales(self) -> Tensor:
        return self._records[:, 3 * self._num_pairs + 2].view(torch.float32)

    def walked(self, num_requests: int) -> Walked:
        records, pairs = self._records[:num_requests], self._num_pairs
        slots, positions, next_tokens = (records[:, i * pairs : (i + 1) * pairs] for i in range(3))
        counts, context_lens = records[:, 3 * pairs], records[:, 3 * pairs + 1]
        found = WalkedPairs(slots, positions, next_tokens, counts, context_lens, self.noise(num_requests).noise_keys)
        return Walked(found, self._hidden_rows[: num_requests * pairs])

    def noise(self, num_requests: int) -> WalkNoise:
        first = 3 * self._num_pairs + 3
        keys = self._records[:num_requests, first : first + 2 * self._num_levels]
        return WalkNoise(self._scales[:num_requests], keys.view(num_requests, -1, 2), self._id_constants)
