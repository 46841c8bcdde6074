"""Drafters that are wrong in one way each, for the tests of the conformance suite; and one that is right."""

from collections.abc import Sequence

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.proposer import Budget, Proposer, StepContext
from tests.spec.conformance_cases import known_text


class Knows(Proposer):
    """Right about the target that repeats itself, and inside its budget: nothing is wrong with it."""

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self.draft(request, budget) for request, budget in zip(step.requests, budgets, strict=True)]

    def draft(self, request: Request, budget: Budget) -> DraftTree:
        room = min(budget.num_nodes, budget.max_depth)
        return DraftTree.chain(known_text(request.token_ids[-1], 1 + room)[1:]) if room else EMPTY_TREE


class NeverDrafts(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        return EMPTY_TREE


class AlwaysWrong(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        return DraftTree.chain([request.token_ids[-1]]) if min(budget[:2]) else EMPTY_TREE


class IgnoresTheBudget(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        return super().draft(request, Budget(100, 100))


class DraftsForNoBudget(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        return super().draft(request, Budget(max(1, budget.num_nodes), max(1, budget.max_depth)))


class Raises(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        raise RuntimeError("a bug")


class RaisesNowAndThen(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        if request.num_output_tokens == 3:
            raise RuntimeError("a rare bug")
        return super().draft(request, budget)


class LosesATree(Knows):
    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return super().propose(step, budgets)[:1]


class DraftsUnknownTokens(Knows):
    def draft(self, request: Request, budget: Budget) -> DraftTree:
        tree = super().draft(request, budget)
        return DraftTree([*tree.token_ids[:-1], 10**6], tree.parents) if tree.token_ids else tree


class KeepsEveryRequest(Knows):
    def __init__(self, *args: object) -> None:
        self.seen: dict[str, int] = {}

    def draft(self, request: Request, budget: Budget) -> DraftTree:
        self.seen[request.request_id] = request.num_tokens
        return super().draft(request, budget)


class MixesRequests(Knows):
    """Drafts for all requests what follows the first one's text."""

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self.draft(step.requests[0], budget) for budget in budgets]


class RefusesEverything(Knows):
    def check_params(self, params: object) -> None:
        raise ValueError("refused")
