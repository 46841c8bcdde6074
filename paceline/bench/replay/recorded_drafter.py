"""Drafters at a price, in a replay. What one with a network drafted at each place comes from the recording.

A recording holds the drafts of one size. Here they are cut as the drafter itself would have stopped: at the budget's
nodes, depth and least probabilities.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.replay.recording import Recorded
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree, likeliest
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext


@dataclass(frozen=True, slots=True)
class DraftPrice:
    """Seconds of a drafter's call: for the call, each level, each request, and each level of each request; and of being
    told of a pass."""

    call_s: float = 0.0
    level_s: float = 0.0
    request_s: float = 0.0
    request_level_s: float = 0.0
    tell_s: float = 0.0  # of being told of a pass

    def __call__(self, num_requests: int, num_levels: int) -> float:
        per_request_s = self.request_s + self.request_level_s * num_levels
        return self.call_s + num_levels * self.level_s + num_requests * per_request_s


class RecordedDrafter(Proposer):
    keeps_min_prob = True
    needs = Needs(hidden_layers=(0,))  # as the drafter itself: it must have been told of passes

    def __init__(
        self, method: str, recorded: Mapping[str, Recorded], price: DraftPrice, spend: Callable[[float], None]
    ) -> None:
        self._method, self._recorded, self._price, self._spend = method, recorded, price, spend

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = []
        for request, budget in zip(step.requests, budgets, strict=True):
            drafts = self._recorded[request.request_id].drafted.get(self._method, ())
            at = request.num_output_tokens
            trees.append(_cut(DraftTree(*_parts(drafts[at])), budget) if at < len(drafts) else EMPTY_TREE)
        asked = sum(min(budget.num_nodes, budget.max_depth) > 0 for budget in budgets)
        if asked:
            self._spend(self._price(asked, max(1, *(max(tree.depths(), default=0) for tree in trees))))
        return trees

    def observe(self, step: StepContext) -> None:
        if step.passes:
            self._spend(self._price.tell_s)


class PricedDrafter(Proposer):
    """A drafter that really drafts here, at a given price: what it takes on this machine, now, does not count."""

    def __init__(self, inner: Proposer, price: DraftPrice, spend: Callable[[float], None]) -> None:
        self._inner, self._price, self._spend = inner, price, spend
        self.needs, self.keeps_min_prob = inner.needs, inner.keeps_min_prob

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = self._inner.propose(step, budgets)
        self._spend(self._price(len(step.requests), max([max(tree.depths(), default=0) for tree in trees], default=0)))
        return trees

    def observe(self, step: StepContext) -> None:
        self._inner.observe(step)
        if step.passes:
            self._spend(self._price.tell_s)

    def can_draft(self, request: Request) -> bool:
        return self._inner.can_draft(request)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self._inner.use_clock(clock)


def _parts(drafted: tuple[list[int], list[int], list[float]]) -> tuple[list[int], list[int], None, None, list[float]]:
    token_ids, parents, confidence = drafted
    return token_ids, parents, None, None, confidence


def _cut(tree: DraftTree, budget: Budget) -> DraftTree:
    if not tree.token_ids or min(budget.num_nodes, budget.max_depth) < 1:
        return EMPTY_TREE
    assert tree.confidence is not None
    is_chain, seen = budget.num_nodes <= budget.max_depth, set[int]()
    paths: list[float] = []
    depths = tree.depths()
    for node, parent in enumerate(tree.parents):
        above = 1.0 if parent < 0 else paths[parent]
        path = above * tree.confidence[node]
        is_second = is_chain and parent in seen  # room for one path is filled with one path: the first children
        seen.add(parent)
        stopped = path < budget.min_prob or (parent >= 0 and above < budget.min_prob_to_extend)
        paths.append(-math.inf if is_second or stopped or above < 0 or depths[node] > budget.max_depth else path)
    return tree.keep(likeliest(paths, budget.num_nodes, 0.0))
