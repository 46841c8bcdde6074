"""`none`: drafts nothing, so every step is a plain decode step."""

from collections.abc import Sequence

from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.proposer import Budget, Proposer, StepContext


class NoProposer(Proposer):
    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [EMPTY_TREE for _ in step.requests]

    def skips_next_step(self) -> bool:
        return True
