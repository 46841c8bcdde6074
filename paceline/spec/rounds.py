"""Rounds: the device walks the trees of a pass, drafts the next ones and runs the pass over them, all in one launch.

The host learns the tokens one round later. So it can launch a round while the one before still runs, which takes its
own work out of the step. What it must know beforehand is whose rows there are and which blocks they may write to;
`engine/rounds.py` decides whether it does.

    size = rounds.plan(2, budget)
    rounds.begin(requests, size, roots)  # after a pass that was launched, in which each had its last token and its tree
    rounds.launch([True, True], None)    # each round: which of them have not ended
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


MUCH_SMALLER = 4  # a group that has a quarter of its requests left goes on in a size of its own


class RoundSize(NamedTuple):
    """One captured size."""

    num_requests: int  # at most
    budget: Budget  # of each tree
    num_rows: int  # of the pass

    @property
    def rows_each(self) -> int:
        return 1 + self.budget.num_nodes

    def count_for(self, num_alive: int) -> int:
        """The number of requests whose size a group of rounds has with so many of its requests left: its own, until
        few are. A change takes as long as three rounds, and half as many requests save a twentieth of one."""
        return self.num_requests if num_alive * MUCH_SMALLER > self.num_requests else num_alive


class DeviceRounds(Protocol):
    def plan(self, num_requests: int, budget: Budget) -> RoundSize | None:
        """The size that rounds of so many requests have by now, none larger than the budget; None: there are none.
        The pass before the first round must be padded to as many rows."""
        ...

    def begin(self, requests: Sequence[Request], size: RoundSize, roots: Sequence[int]) -> bool:
        """After a launched pass over these requests, in that order: `roots` are the rows of their last tokens in it.
        False, and nothing is changed, where the device does not know enough of them."""
        ...

    def launch(self, is_alive: Sequence[bool], tables: NDArray[np.int32] | None) -> PendingRound:
        """`tables`: the blocks of all requests, [requests, max_blocks], where they have changed."""
        ...


class RoundChoice(NamedTuple):
    """Who drafts in rounds, and how much at most."""

    method: str
    rounds: DeviceRounds
    budget: Budget
