"""`lookahead`: the target guesses several positions at once in a Jacobi window; the n-grams it forms become drafts.

The window has W columns and N - 1 levels. Level 0 is a chain of guesses for the next W positions; level l of column j
guesses the token after level l - 1 of the same column. So the window is itself a tree and rides in the draft:

    last token ─ a0 ─ b0 ─ c0          levels:  a1 hangs on a0, a2 on a1
                 │    │    │                    b1 hangs on b0, ...
                 a1   b1   c1
                 │    │    │
                 a2   b2   c2 ─► argmax: the newest guess of each column

After the pass each column has become an n-gram (a0 a1 a2 new) for the pool, keyed by its first token, and every level
moves up by one. The pool's n-grams that begin with the request's last token are the real drafts of the next pass.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import Budget, Needs, Proposer, RequestPass, StepContext
from paceline.spec.trie import Trie

MAX_POOL_KEYS = 4096  # first tokens kept for a request, least recently used go first


class Pool:
    """First token -> the n-grams' other tokens, newest first."""

    def __init__(self, per_key: int) -> None:
        self._per_key = per_key
        self._grams: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        grams = self._grams.setdefault(first, [])
        if rest in grams:
            grams.remove(rest)
        grams.insert(0, rest)
        del grams[self._per_key :]
        self._grams.move_to_end(first)
        if len(self._grams) > MAX_POOL_KEYS:
            self._grams.popitem(last=False)

    def get(self, first: int) -> list[tuple[int, ...]]:
        return self._grams.get(first, [])


@dataclass(slots=True)
class Window:
    """One request's window and pool. `levels[l][j]`: level l of column j."""

    levels: list[list[int]]
    pool: Pool
    rng: random.Random
    nodes: dict[int, int] = field(default_factory=dict)  # column -> node of its last level, in the last tree


class LookaheadProposer(Proposer):
    needs = Needs(logits=True)
    keeps_whole = True  # the window is computed by its own nodes

    def __init__(
        self, services: EngineParts, largest: Budget, *, window_size: int, ngram_size: int, guess_set_size: int
    ) -> None:
        self._width, self._levels, self._guesses = window_size, ngram_size - 1, guess_set_size
        self._windows: dict[str, Window] = {}

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(r, b) for r, b in zip(step.requests, budgets, strict=True)]

    def observe(self, step: StepContext) -> None:
        for verified in step.passes:
            window = self._windows.get(verified.request.request_id)
            if window is not None and window.nodes and step.logits is not None:
                self._advance(window, verified, step.logits)
        for request in step.gone:
            self._windows.pop(request.request_id, None)

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        window = self._windows.get(request.request_id)
        if window is None:
            window = self._windows[request.request_id] = self._open(request)
        trie = Trie()
        for rest in window.pool.get(request.token_ids[-1])[: self._guesses]:
            trie.add_path(rest[: budget.max_depth], 0.5, budget.num_nodes)
        self._add_window(trie, window, budget)
        return trie.tree()

    def _open(self, request: Request) -> Window:
        """A first window of tokens from the prompt, and the prompt's own n-grams for the pool."""
        tokens = request.prompt_token_ids
        rng = random.Random(request.seed)
        levels = [[rng.choice(tokens) for _ in range(self._width)] for _ in range(self._levels)]
        pool = Pool(self._guesses)
        for i in range(len(tokens) - self._levels):
            pool.add(tokens[i], tuple(tokens[i + 1 : i + 1 + self._levels]))
        return Window(levels, pool, rng)

    def _add_window(self, trie: Trie, window: Window, budget: Budget) -> None:
        """As many whole columns as the budget holds, the first one first."""
        window.nodes = {}
        top = -1
        for column in range(self._width):
            deepest = column + self._levels  # depth of the column's last level
            if deepest > budget.max_depth or len(trie) + self._levels > budget.num_nodes:
                return
            top = node = trie.add(top, window.levels[0][column], 0.1)
            for level in window.levels[1:]:
                node = trie.add(node, level[column], 0.1)
            window.nodes[column] = node

    def _advance(self, window: Window, verified: RequestPass, logits: Tensor) -> None:
        """Read the newest guesses, hand the n-grams to the pool, and move the window on to the new last token."""
        nodes, window.nodes = window.nodes, {}
        # Where the scheduler had no room for the whole tree, its last columns were not computed.
        columns = [column for column, node in nodes.items() if node < len(verified.draft)]
        if not columns or verified.logits_row < 0:
            return
        rows = torch.tensor([verified.logits_row + 1 + nodes[column] for column in columns], device=logits.device)
        seen = verified.request.token_ids
        newest = [window.rng.choice(seen) for _ in range(self._width)]
        for column, guess in zip(columns, logits[rows].argmax(dim=1).tolist(), strict=True):
            gram = [*(level[column] for level in window.levels), guess]
            window.pool.add(gram[0], tuple(gram[1:]))
            newest[column] = guess
        window.levels = [*window.levels[1:], newest]
        # Moving up a level moved every column on by one position; more tokens than one leave the first columns behind.
        for level in window.levels:
            del level[: len(verified.new_token_ids) - 1]
            level.extend(window.rng.choice(seen) for _ in range(self._width - len(level)))
