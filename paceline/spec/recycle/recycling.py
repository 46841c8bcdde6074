"""`recycling`, token recycling: the target's own likeliest successors of each token, seen earlier, fill a tree.

A table keeps, for every token, the tokens that the target last ranked highest after it, and a second one the same for
the last pairs of tokens, which is asked first. Every verified row updates both, rejected nodes included: what was
computed and thrown away is used again. A draft fills a fixed tree shape from the tables, level by level; the
shape is the best one (tree_shape.py) for the acceptance by rank measured so far, or for `recycling_acceptance`, by
depth and rank, as `paceline tune tree` finds it in a recording.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.config.tree_shape import TreeShape, optimal_shape
from paceline.spec.engine_parts import EngineParts
from paceline.spec.lookup.by_salt import BySalt
from paceline.spec.model.top_tokens import top_tokens
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext
from paceline.spec.trie import Trie

# Acceptance by rank that a fresh engine starts with; what it measures takes over (weight: PRIOR_DRAFTS guesses).
PRIOR_ACCEPTANCE = (0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02)
PRIOR_DRAFTS = 64.0
MAX_PAIRS = 1 << 16
NO_TOKEN = -1
REPLAN_EVERY = 128  # verified positions between two looks at the tree's shape


class Successors:
    """The tokens that the target ranked highest after each token, and after each pair of tokens; best first."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._after_token: dict[int, list[int]] = {}
        self._after_pair: OrderedDict[tuple[int, int], list[int]] = OrderedDict()

    def learn_prompt(self, tokens: Sequence[int]) -> None:
        """The prompt's own pairs go to the front of the table: it has no logits to learn from."""
        for token, successor in itertools.pairwise(tokens):
            self._after_token[token] = self._in_front(successor, self._after_token.get(token, []))
        for i in range(2, len(tokens)):
            pair = (tokens[i - 2], tokens[i - 1])
            self._after_pair[pair] = self._in_front(tokens[i], self._after_pair.get(pair, []))

    def learn(self, before: int, token: int, successors: list[int]) -> None:
        self._after_token[token] = successors
        self._after_pair[before, token] = successors
        self._after_pair.move_to_end((before, token))

    def trim(self) -> None:
        while len(self._after_pair) > MAX_PAIRS:
            self._after_pair.popitem(last=False)

    def known(self, before: int, token: int) -> list[int]:
        """The likeliest successors of `token` after `before`, then those after anything."""
        particular = self._after_pair.get((before, token))
        general = self._after_token.get(token, [])
        if particular is None:
            return general
        if len(particular) >= self._top_k:
            return particular
        return [*particular, *(t for t in general if t not in particular)][: self._top_k]

    def _in_front(self, successor: int, known: list[int]) -> list[int]:
        return [successor, *(token for token in known if token != successor)][: self._top_k]


class RecyclingProposer(Proposer):
    needs = Needs(logits=True)

    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        recycling_top_k: int,
        recycling_acceptance: Sequence[Sequence[float]] | None = None,  # [depth][rank]; None: by rank, as measured
    ) -> None:
        self._top_k = recycling_top_k
        self._successors = BySalt(lambda: Successors(recycling_top_k))
        prior = [*PRIOR_ACCEPTANCE, *([PRIOR_ACCEPTANCE[-1]] * recycling_top_k)][:recycling_top_k]
        self._hits = [PRIOR_DRAFTS * chance for chance in prior]
        self._guesses = PRIOR_DRAFTS
        self._given = recycling_acceptance
        self._shapes: dict[tuple[int, int], TreeShape] = {}  # by nodes and depth
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
                self._successors[verified.request.cache_salt].learn_prompt(verified.request.prompt_token_ids)
            self._measure(verified)
        if step.logits is not None:
            self._update(step.passes, step.logits)
        for request in step.gone:
            self._seen_prompt.discard(request.request_id)

    def _measure(self, verified: RequestPass) -> None:
        """At which rank did the table hold the tokens that came? Judged before the table learns from them."""
        if verified.logits_row < 0 or not verified.new_token_ids:
            return
        tokens, successors = verified.request.token_ids, self._successors[verified.request.cache_salt]
        for i in range(len(tokens) - len(verified.new_token_ids), len(tokens)):
            known = successors.known(tokens[i - 2] if i > 1 else NO_TOKEN, tokens[i - 1])
            if known:
                self._guesses += 1.0
                self._since_plan += 1
                if tokens[i] in known:
                    self._hits[known.index(tokens[i])] += 1.0

    def _update(self, passes: Sequence[RequestPass], logits: Tensor) -> None:
        rows = list(_verified_rows(passes))
        if not rows:
            return
        chosen = logits
        if len(rows) != logits.shape[0]:
            chosen = logits[torch.tensor([row.logits_row for row in rows], device=logits.device)]
        for row, successors in zip(rows, top_tokens(chosen, self._top_k).tolist(), strict=True):
            self._successors[row.salt].learn(row.before, row.token, successors)
        for salt in {row.salt for row in rows}:
            self._successors[salt].trim()

    def _shape(self, budget: Budget) -> TreeShape:
        if self._since_plan >= REPLAN_EVERY and self._given is None:
            self._since_plan = 0
            self._shapes.clear()
        size = (budget.num_nodes, budget.max_depth)
        if size not in self._shapes:
            acceptance = self._given or [self.acceptance]
            self._shapes[size] = optimal_shape(acceptance, *size)
        return self._shapes[size]

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        if min(budget.num_nodes, budget.max_depth) < 1:
            return EMPTY_TREE
        tokens, table = request.token_ids, self._successors[request.cache_salt]
        shape, acceptance = self._shape(budget), self.acceptance
        trie = Trie()
        # node of the shape -> (node of the tree, its parent's token, its own), or None where nothing is known
        placed: list[tuple[int, int, int] | None] = [(-1, tokens[-2] if len(tokens) > 1 else NO_TOKEN, tokens[-1])]
        for parent, rank in zip(shape.parents, shape.ranks, strict=True):
            above = placed[parent + 1]
            successors = [] if above is None else table.known(above[1], above[2])
            if above is None or rank >= len(successors):
                placed.append(None)
                continue
            node = trie.add(above[0], successors[rank], acceptance[rank])
            placed.append((node, above[2], successors[rank]))
        return trie.tree()


class VerifiedRow(NamedTuple):
    logits_row: int
    before: int  # the token before `token`
    token: int
    salt: str


def _verified_rows(passes: Sequence[RequestPass]) -> Iterator[VerifiedRow]:
    """Every root and node of the pass."""
    for verified in passes:
        if verified.logits_row < 0:
            continue
        tokens, draft, salt = verified.request.token_ids, verified.draft, verified.request.cache_salt
        root = verified.start + verified.num_committed - 1
        yield VerifiedRow(verified.logits_row, tokens[root - 1] if root > 0 else NO_TOKEN, tokens[root], salt)
        for i, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            before = tokens[root] if parent < 0 else draft.token_ids[parent]
            yield VerifiedRow(verified.logits_row + 1 + i, before, token, salt)
