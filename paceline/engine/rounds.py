"""Passes whose drafts the device makes by itself, launched one after the other (spec/rounds.py).

A pass with drafts can be followed by a *round* before it is collected: the device walks its trees, drafts, and verifies
the new ones. What the host must know beforehand is who takes part and where they may write. It reserves blocks as if
every draft were accepted, and what a request draws after its end is dropped.

A round follows only where nobody else wants to run: when a request arrives, or when so many have ended that a much
smaller size would do, the last round is collected first, and the next pass is planned as always.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engine.runner import LaunchedRows, PassOutput
from paceline.engine.scheduler import ScheduledRequest, Scheduler
from paceline.spec.proposer import Budget
from paceline.spec.rounds import PendingRound, RoundChoice, RoundSize
from paceline.spec.speculator import Speculator


@dataclass(slots=True)
class RoundMembers:
    """Requests that go on in rounds together, in the order of their rows."""

    requests: list[Request]
    choice: RoundChoice
    size: RoundSize
    tables: NDArray[np.int32]  # [requests, max_blocks]: their blocks, as the device has them
    blocks: list[list[int]]  # the same
    is_begun: bool = False


@dataclass(slots=True)
class RoundRows:
    """A round on its way. Its trees, and where its rows stand in their texts, are known when it is collected."""

    scheduled: Sequence[ScheduledRequest]
    places: list[int]  # of each scheduled request, among the members
    members: RoundMembers
    hidden_layers: tuple[int, ...]
    pending: PendingRound
    drafted: frozenset[str]  # ids of its requests
    no_logits: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def collect(self) -> PassOutput:
        result, choice = self.pending.collect(), self.members.choice
        first_rows = [place * self.members.size.rows_each for place in self.places]
        for entry, place in zip(self.scheduled, self.places, strict=True):
            entry.draft = result.trees[place].by(choice.method)
            entry.start = len(entry.request.token_ids) - 1
        return PassOutput(
            self.no_logits,
            result.hidden,
            self.hidden_layers,
            first_rows,
            [range(first, first + entry.num_rows) for first, entry in zip(first_rows, self.scheduled, strict=True)],
            [result.tokens[place] for place in self.places],
        )


class Rounds:
    def __init__(self, scheduler: Scheduler, speculator: Speculator, max_blocks: int) -> None:
        self._scheduler, self._speculator, self._max_blocks = scheduler, speculator, max_blocks
        self._max_length = speculator.services.max_model_len

    def members(self, scheduled: Sequence[ScheduledRequest]) -> RoundMembers | None:
        """Those of a planned pass that may go on in rounds after it; None where there will be none."""
        if not self._all_run(len(scheduled)):
            return None
        if any(entry.num_committed != 1 or not entry.reaches_end for entry in scheduled):
            return None
        requests = [entry.request for entry in scheduled]
        choice = self._speculator.rounds_for(requests)
        size = None if choice is None else choice.rounds.plan(len(requests), choice.budget)
        if choice is None or size is None or not all(_fits(entry.draft, size.budget) for entry in scheduled):
            return None
        tables = np.zeros((len(requests), self._max_blocks), dtype=np.int32)
        return RoundMembers(requests, choice, size, tables, [[] for _ in requests])

    def launch_after(
        self, rows: LaunchedRows | RoundRows, members: RoundMembers, hidden_layers: tuple[int, ...]
    ) -> RoundRows | None:
        """The round after a pass that was launched; None where that must be collected first."""
        alive = [not request.finished and _goes_on(request) for request in members.requests]
        places = [place for place, is_alive in enumerate(alive) if is_alive]
        num_running = sum(not request.finished for request in members.requests)
        if not places or not self._all_run(num_running) or not self._is_right_size(members, len(places)):
            return None
        if not self._reserve(members, places) or not self._begin(rows, members):
            return None
        changed = self._write_tables(members, places)
        pending = members.choice.rounds.launch(alive, members.tables if changed else None)
        # Where each stands is not known yet: see `RoundRows.collect`.
        entries = [ScheduledRequest(members.requests[place], start=0, num_committed=1) for place in places]
        drafted = frozenset(entry.request.request_id for entry in entries)
        return RoundRows(entries, places, members, hidden_layers, pending, drafted)

    def _all_run(self, num_requests: int) -> bool:
        return not self._scheduler.waiting and len(self._scheduler.running) == num_requests > 0

    def _is_right_size(self, members: RoundMembers, num_alive: int) -> bool:
        choice, size = members.choice, members.size
        return choice.rounds.plan(size.count_for(num_alive), choice.budget) == size

    def _reserve(self, members: RoundMembers, places: Sequence[int]) -> bool:
        """Blocks for all that the pass on its way may accept, one token more, and the nodes of the round."""
        scheduler, budget = self._scheduler, members.size.budget
        ahead = budget.max_depth + 2 + budget.num_nodes
        for place in places:
            request = members.requests[place]
            needed = request.num_tokens + ahead
            if needed > self._max_length or not scheduler.kv.reserve(request, needed):
                return False
        scheduler.num_lookahead_tokens = max(scheduler.num_lookahead_tokens, ahead)  # what is reserved stays so
        return True

    def _begin(self, rows: LaunchedRows | RoundRows, members: RoundMembers) -> bool:
        if members.is_begun:
            return True
        assert isinstance(rows, LaunchedRows)
        if not all(rows.is_drawn) or rows.batch.num_rows > members.size.num_rows:
            return False
        roots = rows.batch.cu_query.tolist()[:-1]
        members.is_begun = members.choice.rounds.begin(members.requests, members.size, roots)
        return members.is_begun

    def _write_tables(self, members: RoundMembers, places: Sequence[int]) -> bool:
        """Is there anything new to send?"""
        changed = False
        for place in places:
            blocks = members.requests[place].block_ids
            if blocks != members.blocks[place]:
                members.blocks[place] = list(blocks)
                members.tables[place, : len(blocks)] = blocks
                changed = True
        return changed


def _fits(tree: DraftTree, budget: Budget) -> bool:
    """What the walk of a round looks at, and blocks are reserved for."""
    if len(tree) > budget.num_nodes:
        return False
    return len(tree) <= budget.max_depth or max(tree.depths()) <= budget.max_depth


def _goes_on(request: Request) -> bool:
    """Not where the pass on its way gives it its last token for certain."""
    return request.num_output_tokens + 1 < request.max_tokens
