"""EAGLE's part of rounds on the device: the newest pairs are found by the walk, and the draft is that of
captured_drafts.py."""

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.request import Request
from paceline.ops.rounds import RoundState
from paceline.spec.feature.captured_drafts import CapturedDrafts
from paceline.spec.feature.draft_levels import DraftShape
from paceline.spec.feature.draft_writer import Wanted
from paceline.spec.proposer import Budget
from paceline.spec.round_draft import RoundRoom, Walked
from paceline.spec.rounds import RoundSize

WantedOf = Callable[[Request, Budget], Wanted]


class EagleRoundDraft:
    def __init__(self, drafts: CapturedDrafts, hidden_layers: Sequence[int], wanted_of: WantedOf) -> None:
        room = drafts.room
        self.room = RoundRoom(room.max_requests, room.num_nodes, room.num_levels)
        self.hidden_layers = tuple(hidden_layers)
        self._drafts, self._wanted_of = drafts, wanted_of

    def begin(self, size: RoundSize, requests: Sequence[Request]) -> bool:
        if not all(self._drafts.suit(request) for request in requests):
            return False
        wanted = [self._wanted_of(request, size.budget) for request in requests]
        return self._drafts.write_ahead(self._shape(size), wanted)

    def walked(self, size: RoundSize) -> Walked:
        shape = self._shape(size)
        return Walked(self._drafts.views(shape), self._drafts.hidden_rows(shape))

    def draft(self, size: RoundSize, state: RoundState, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return self._drafts.run_after(hidden, self._shape(size))

    def _shape(self, size: RoundSize) -> DraftShape:
        budget = size.budget
        width = 1 if budget.num_nodes <= budget.max_depth else self._drafts.room.width
        return DraftShape(size.num_requests, width, budget.max_depth)
