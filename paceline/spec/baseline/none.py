"""`none`: drafts nothing, so every step is a plain decode step."""

from collections.abc import Sequence

from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.engine_parts import Services
from paceline.spec.proposer import Budget, Needs, StepContext


class NoProposer:
    name = "none"
    needs = Needs()

    def __init__(self, services: Services, largest: Budget) -> None:
        pass

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [EMPTY_TREE for _ in step.requests]

    def observe(self, step: StepContext) -> None:
        pass
