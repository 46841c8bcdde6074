"""`oracle`: drafts the truth with a chosen accuracy and tree shape. For tests and the lab, not for users.

It is given whole sequences (prompt + output) and finds a request's own by its tokens so far. Along the true path, each
node's children hold the true next token with probability `accuracy`; all others are wrong. With `accuracy` a and a
chain of K, the expected tokens per step are (1 - a^(K+1)) / (1 - a).

Every draw is a function of (seed, position), so a request drafts the same tree alone, in a batch, or after preemption.
"""

import random
from collections.abc import Iterator, Sequence

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Proposer, StepContext

MAX_RANDOM_WIDTH = 3


class OracleProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        sequences: Sequence[Sequence[int]] = (),
        accuracy: float = 1.0,
        shape: str | tuple[int, ...] = "chain",
        seed: int = 0,
    ) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        self._vocab_size = services.vocab_size
        self._accuracy, self._shape, self._seed = accuracy, shape, seed
        self._truth: dict[str, list[int]] = {}  # request id -> its whole sequence

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(r, b) for r, b in zip(step.requests, budgets, strict=True)]

    def observe(self, step: StepContext) -> None:
        for request in step.gone:
            self._truth.pop(request.request_id, None)

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        truth = self._find(request)
        position = request.num_tokens
        if truth is None or len(truth) <= position:
            return EMPTY_TREE
        future = truth[position : position + budget.max_depth]
        rng = random.Random(f"{self._seed}/{position}")
        return self._grow(future, budget, rng)

    def _find(self, request: Request) -> list[int] | None:
        tokens = request.token_ids
        known = self._truth.get(request.request_id)
        if known is None or known[: len(tokens)] != tokens:  # sampled requests may share a prompt
            known = next((s for s in self.sequences if s[: len(tokens)] == tokens), None)
            if known is not None:
                self._truth[request.request_id] = known
        return known

    def _grow(self, future: Sequence[int], budget: Budget, rng: random.Random) -> DraftTree:
        token_ids: list[int] = []
        parents: list[int] = []
        frontier = [(-1, True)]  # (node, on the true path)
        for depth, width in zip(range(budget.max_depth), self._widths(rng), strict=False):
            grown: list[tuple[int, bool]] = []
            for node, true in frontier:
                # Past the end of the known future nothing is true: draft wrong tokens there.
                next_true = future[depth] if true and depth < len(future) else None
                for token, is_true in self._children(next_true, width, rng):
                    if len(token_ids) >= budget.num_nodes:
                        break
                    grown.append((len(token_ids), is_true))
                    token_ids.append(token)
                    parents.append(node)
            frontier = grown
        return DraftTree(token_ids, parents)

    def _widths(self, rng: random.Random) -> Iterator[int]:
        if isinstance(self._shape, tuple):
            yield from self._shape
            return
        while True:
            yield 1 if self._shape == "chain" else rng.randint(0, MAX_RANDOM_WIDTH)

    def _children(self, truth: int | None, width: int, rng: random.Random) -> list[tuple[int, bool]]:
        """`width` distinct siblings, one of them true with probability `accuracy`."""
        hit = rng.random() < self._accuracy and truth is not None
        spot = rng.randrange(width) if width else 0
        children: list[tuple[int, bool]] = []
        used = {truth}
        while len(children) < min(width, self._vocab_size - 1):
            if hit and truth is not None and len(children) == spot:
                children.append((truth, True))
                continue
            token = rng.randrange(self._vocab_size)
            if token not in used:
                used.add(token)
                children.append((token, False))
        return children
