"""`grammar`: what the request's grammar leaves no choice about is the draft.

Where a schema says which key comes next, or the text can only end, the next tokens are known before the target has
been asked: the mask allows one token alone, so the draft is accepted with certainty. Behind these stands text that must
come, but that could be cut into tokens in several ways; it is drafted in the tokenizer's own way, with the probability
that this was right so far. A request without a grammar gets no draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.constraint import Forced
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Proposer, RequestPass, StepContext

NEW_GUESSES = 2.0  # a guess about spelling starts at one right of two: the first dozen guesses move it where it belongs


@dataclass(slots=True)
class _Record:
    """Of the guesses about spelling, over all requests."""

    num_right: float = NEW_GUESSES / 2
    num_made: float = NEW_GUESSES

    @property
    def rate(self) -> float:
        return self.num_right / self.num_made


class GrammarProposer(Proposer):
    def __init__(self, services: EngineParts, largest: Budget) -> None:
        self._drafted: dict[str, Forced] = {}  # request id -> what was drafted for its next pass
        self._spelling = _Record()

    def can_draft(self, request: Request) -> bool:
        return request.constraint is not None

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(request, budget) for request, budget in zip(step.requests, budgets, strict=True)]

    def observe(self, step: StepContext) -> None:
        for verified in step.passes:
            forced = self._drafted.pop(verified.request.request_id, None)
            if forced is not None:
                self._learn(forced, verified)
        for request in step.gone:
            self._drafted.pop(request.request_id, None)

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        length = min(budget.num_nodes, budget.max_depth)
        if request.constraint is None or length < 1:
            return EMPTY_TREE
        forced = request.constraint.forced(length)
        if not forced.token_ids:
            return EMPTY_TREE
        self._drafted[request.request_id] = forced
        chain = DraftTree.chain(forced.token_ids)
        num_guessed = len(chain) - forced.num_certain
        confidence = [1.0] * forced.num_certain + [self._spelling.rate] * num_guessed
        return DraftTree(chain.token_ids, chain.parents, confidence=confidence)

    def _learn(self, forced: Forced, verified: RequestPass) -> None:
        """The first guess that was wrong is the last that says anything. All were verified, drafted by whomever."""
        new = verified.new_token_ids
        for i in range(forced.num_certain, min(len(forced.token_ids), len(new))):
            self._spelling.num_made += 1
            self._spelling.num_right += new[i] == forced.token_ids[i]
            if new[: i + 1] != forced.token_ids[: i + 1]:
                return
