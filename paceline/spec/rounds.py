"""Rounds: the device walks the trees of a pass, drafts the next ones and runs the pass over them, all in one launch.

The host learns the tokens one round later. So it can launch a round while the one before still runs, which takes its
own work out of the step. What it must know beforehand is whose rows there are and which blocks they may write to;
`engine/rounds.py` decides whether it does.

    rounds.begin(requests, budget, roots)     # after a pass that was launched, in which each had one row and its tree
    rounds.launch([True, True], None)        # each later one: which of them have not ended
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.spec.proposer import Budget


class RoundResult(NamedTuple):
    trees: list[DraftTree]  # of each request, as the pass verified them
    tokens: list[list[int | None]]  # of each request: drawn at its last token and at the nodes
    hidden: Tensor | None  # of the pass, until the next launch


class PendingRound(Protocol):
    def collect(self) -> RoundResult: ...  # waits for it; to be called once


class DeviceRounds(Protocol):
    @property
    def rows_each(self) -> int: ...  # rows of a pass that a request has in a round

    def least_size(self, num_requests: int, budget: Budget) -> int | None:
        """Rows that the pass before the first round must be padded to; None: there are no rounds of this size."""
        ...

    def begin(self, requests: Sequence[Request], budget: Budget, roots: Sequence[int]) -> bool:
        """After a launched pass over these requests, in that order: `roots` are the rows of their last tokens in it.
        False, and nothing is changed, where the device does not know enough of them."""
        ...

    def launch(self, is_alive: Sequence[bool], tables: NDArray[np.int32] | None) -> PendingRound:
        """`tables`: the blocks of all requests, [requests, max_blocks], where they have changed."""
        ...


class RoundChoice(NamedTuple):
    """Who drafts in rounds, and how much."""

    method: str
    rounds: DeviceRounds
    budget: Budget
