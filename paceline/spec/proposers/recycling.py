"""`recycling`, token recycling: the target's own likeliest successors of each token, seen earlier, fill a tree.

A table keeps, for every token, the tokens that the target last ranked highest after it. Every verified row updates it,
rejected nodes included: what was computed and thrown away is used again. A draft fills a fixed tree shape from the
table, level by level; the shape is the best one (tree_shape.py) for the acceptance by rank measured so far.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.proposer import Budget, Needs, RequestPass, StepContext
from paceline.spec.services import Services
from paceline.spec.top_tokens import top_tokens
from paceline.spec.tree_shape import TreeShape, optimal_shape
from paceline.spec.trie import Trie

# Acceptance by rank that a fresh engine starts with; what it measures takes over (weight: PRIOR_DRAFTS guesses).
PRIOR_ACCEPTANCE = (0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02)
PRIOR_DRAFTS = 64.0
REPLAN_EVERY = 128  # verified positions between two looks at the tree's shape


class RecyclingProposer:
    name = "recycling"
    needs = Needs(logits=True)

    def __init__(self, services: Services, largest: Budget, *, recycling_top_k: int) -> None:
        self._top_k = recycling_top_k
        self._successors: dict[int, list[int]] = {}  # token -> its likeliest successors, best first
        prior = [*PRIOR_ACCEPTANCE, *([PRIOR_ACCEPTANCE[-1]] * recycling_top_k)][:recycling_top_k]
        self._hits = [PRIOR_DRAFTS * chance for chance in prior]
        self._guesses = PRIOR_DRAFTS
        self._shapes: dict[Budget, TreeShape] = {}
        self._since_plan = 0
        self._seen_prompt: set[str] = set()

    @property
    def acceptance(self) -> list[float]:
        """Measured chance, by rank, that a successor is the next token."""
        return [hits / self._guesses for hits in self._hits]

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(r, b) for r, b in zip(step.requests, budgets, strict=True)]

    def observe(self, step: StepContext) -> None:
        for verified in step.passes:
            if verified.request.request_id not in self._seen_prompt:
                self._seen_prompt.add(verified.request.request_id)
                self._learn_prompt(verified.request)
            self._measure(verified)
        if step.logits is not None:
            self._update(step.passes, step.logits)
        for request in step.gone:
            self._seen_prompt.discard(request.request_id)

    def _learn_prompt(self, request: Request) -> None:
        """The prompt's own pairs go to the front of the table: it has no logits to learn from."""
        tokens = request.prompt_token_ids
        for token, successor in itertools.pairwise(tokens):
            known = self._successors.get(token, [])
            self._successors[token] = [successor, *(t for t in known if t != successor)][: self._top_k]

    def _measure(self, verified: RequestPass) -> None:
        """At which rank did the table hold the tokens that came? Judged before the table learns from them."""
        if verified.logits_row < 0 or not verified.new_token_ids:
            return
        before = verified.request.token_ids[-len(verified.new_token_ids) - 1]
        for token in verified.new_token_ids:
            known = self._successors.get(before)
            if known is not None:
                self._guesses += 1.0
                self._since_plan += 1
                if token in known:
                    self._hits[known.index(token)] += 1.0
            before = token

    def _update(self, passes: Sequence[RequestPass], logits: Tensor) -> None:
        rows = list(_verified_rows(passes))
        if not rows:
            return
        chosen = logits
        if len(rows) != logits.shape[0]:
            chosen = logits[torch.tensor([row for row, _ in rows], device=logits.device)]
        for (_, token), successors in zip(rows, top_tokens(chosen, self._top_k).tolist(), strict=True):
            self._successors[token] = successors

    def _shape(self, budget: Budget) -> TreeShape:
        if self._since_plan >= REPLAN_EVERY:
            self._since_plan = 0
            self._shapes.clear()
        if budget not in self._shapes:
            self._shapes[budget] = optimal_shape([self.acceptance], budget.num_nodes, budget.max_depth)
        return self._shapes[budget]

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        if request.token_ids[-1] not in self._successors:
            return EMPTY_TREE
        shape, acceptance = self._shape(budget), self.acceptance
        trie = Trie()
        node_of: dict[int, int | None] = {-1: -1}  # node of the shape -> node of the tree, None where unknown
        for i, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
            above = node_of[parent]
            token = request.token_ids[-1] if above == -1 else trie.token_ids[above] if above is not None else -1
            successors = self._successors.get(token, [])
            node_of[i] = None
            if above is not None and rank < len(successors):
                node_of[i] = trie.add(above, successors[rank], acceptance[rank])
        return trie.tree()


def _verified_rows(passes: Sequence[RequestPass]) -> Iterator[tuple[int, int]]:
    """(logits row, its token) of every root and node in the pass."""
    for verified in passes:
        if verified.logits_row >= 0:
            root = verified.request.token_ids[verified.start + verified.num_committed - 1]
            for i, token in enumerate([root, *verified.draft.token_ids]):
                yield verified.logits_row + i, token
