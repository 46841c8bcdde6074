"""Drafting with a model, or with some of the target's layers: a chain, or a tree by a width schedule such as <2,2,1>.

`draft` catches a request up to its last token (whatever has no KV yet, in chunks), then goes one level deeper per
pass, all requests together. Tokens are taken from the model's logits in one of three ways:

    greedy    the likeliest. Fixed drafts, right for every verification rule.
    sampled   drawn from the model's own q, which goes along with the tree (`draft_probs`).
    coupled   drawn with the noise that the target will use: agrees far more often than an independent draw.

Drafting writes keys and values into the slots past a request's last token, which the scheduler keeps free for it
(`Needs.lookahead_slots`). A chain goes on as if its tokens were committed, one row a pass. A tree is fed whole at every
level: the rows of its upper levels are computed again, which costs next to nothing beside reading the weights, and
saves all other bookkeeping of which row may attend to which.

A chain whose tokens are the likeliest ends where its path becomes unlikely, by the model's own probabilities: each
further token takes a pass of the model, and would probably be drafted in vain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.forward import Decoder
from paceline.core.packing import RequestRows, pack
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.ops.sampling_drafts import Drawn, draft_tokens
from paceline.ops.sampling_edits import NodeRow, needs_edit
from paceline.spec.model.top_tokens import likeliest
from paceline.spec.proposer import Budget

MAX_ROWS = 512  # of one catch-up pass


@dataclass(frozen=True, slots=True)
class Choice:
    """Siblings chosen after one node."""

    drawn: Drawn
    chances: list[float] | None = None  # the model's probability of each; None: it was not asked for them


@dataclass(slots=True)
class Growing:
    """A request's draft under construction."""

    request: Request
    budget: Budget
    start: int  # tokens [0, start) have their KV
    min_prob: float = 0.0  # a less likely path is not drafted on
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # the model's probability of each node after its parent
    path_chance: float = 1.0  # of the newest node's path, in a chain
    frontier: list[int] = field(default_factory=lambda: [-1])  # nodes whose children come next

    def path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def add(self, node: int, choice: Choice) -> None:
        """Hang these children under `node`, as far as there is room."""
        drawn = choice.drawn
        for i, token in enumerate(drawn.token_ids):
            if len(self.token_ids) >= self.budget.num_nodes:
                break
            self.frontier.append(len(self.token_ids))
            self.token_ids.append(token)
            self.parents.append(node)
            if drawn.probs is not None:
                self.probs.append(drawn.probs[i])
            if choice.chances is not None:
                self.chances.append(choice.chances[i])
                self.path_chance *= choice.chances[i]

    def tree(self) -> DraftTree:
        if not self.token_ids:
            return EMPTY_TREE
        probs = torch.stack(self.probs) if self.probs else None
        chances = self.chances if len(self.chances) == len(self.token_ids) else None
        return DraftTree(self.token_ids, self.parents, probs, confidence=chances)


class ModelDrafter:
    def __init__(
        self,
        decoder: Decoder,
        kv_cache: Tensor,  # [layers, 2, slots, kv_heads, head_dim]
        block_size: int,
        *,
        layers: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,  # None: a chain
        sampling: str | None = None,
        vocab_size: int | None = None,  # the target's, where the drafting model has more rows
        min_prob: float = 0.0,  # a chain ends after a path that is less likely than that
    ) -> None:
        self.decoder, self.kv_cache, self.block_size = decoder, kv_cache, block_size
        self.layers = None if layers is None else list(layers)
        self.widths = None if widths is None else list(widths)
        self.sampling = sampling or "coupled"
        self._vocab_size = vocab_size or decoder.config.vocab_size
        # What was drawn must not decide what is offered: that would bias the output.
        self._min_prob = min_prob if widths is None and self.sampling != "sampled" else 0.0

    def draft(self, requests: Sequence[Request], budgets: Sequence[Budget], starts: Sequence[int]) -> list[DraftTree]:
        """`starts`: how many tokens of each request have their KV already, its last token never among them."""
        drafts = [Growing(r, b, s, self._min_prob) for r, b, s in zip(requests, budgets, starts, strict=True)]
        ready = [d for d in drafts if self._room(d) and min(d.budget.num_nodes, d.budget.max_depth) > 0]
        logits = self._catch_up(ready)
        depth = 0
        while ready:
            width = 1 if self.widths is None else self.widths[depth]
            self._expand(ready, logits, width)
            depth += 1
            ready = [d for d in ready if self._goes_on(d, depth)]
            if ready:
                logits = self._run([self._rows(draft) for draft in ready])
        return [draft.tree() for draft in drafts]

    def _room(self, draft: Growing) -> int:
        """Slots past the last token that are really there; where blocks are short the scheduler keeps fewer."""
        return len(draft.request.block_ids) * self.block_size - draft.request.num_tokens + 1

    def _goes_on(self, draft: Growing, depth: int) -> bool:
        deeper = depth < draft.budget.max_depth and (self.widths is None or depth < len(self.widths))
        num_fed = len(draft.token_ids)  # nodes that get a slot in the next pass
        deeper = deeper and draft.path_chance >= draft.min_prob
        return deeper and bool(draft.frontier) and num_fed < min(draft.budget.num_nodes, self._room(draft))

    def _catch_up(self, drafts: Sequence[Growing]) -> Tensor:
        """Compute every committed token that has no KV yet; logits of the last ones [len(drafts), vocab]."""
        entries: list[RequestRows] = []
        for draft in drafts:
            request = draft.request
            begin = draft.start
            while request.num_tokens - begin > MAX_ROWS:
                chunk = request.token_ids[begin : begin + MAX_ROWS]
                self._run([RequestRows(request.block_ids, chunk, begin, num_wanted=0)])
                begin += MAX_ROWS
            entries.append(RequestRows(request.block_ids, request.token_ids[begin:], begin))
        return self._run(entries) if entries else torch.empty(0, self._vocab_size)

    def _rows(self, draft: Growing) -> RequestRows:
        request = draft.request
        if self.widths is None:
            # The chain's newest token, at the position it would have if it were committed.
            last = request.num_tokens + len(draft.token_ids) - 1
            return RequestRows(request.block_ids, draft.token_ids[-1:], last)
        nodes = DraftTree(draft.token_ids, draft.parents)
        return RequestRows(
            request.block_ids, request.token_ids[-1:], request.num_tokens - 1, nodes, len(draft.frontier)
        )

    def _run(self, entries: Sequence[RequestRows]) -> Tensor:
        """Logits of the wanted rows, request by request: [sum(num_wanted), vocab]."""
        batch = pack(entries, self.block_size)
        return self.decoder.forward(batch, self.kv_cache, layers=self.layers).logits[:, : self._vocab_size]

    def _expand(self, drafts: Sequence[Growing], logits: Tensor, width: int) -> None:
        """Hang `width` children under every frontier node; rows of `logits` are the frontiers, in order."""
        owners = [(draft, node) for draft in drafts for node in draft.frontier]
        chosen = self._choose(owners, logits, width)
        for draft in drafts:
            draft.frontier = []
        for (draft, node), choice in zip(owners, chosen, strict=True):
            draft.add(node, choice)

    def _choose(self, owners: Sequence[tuple[Growing, int]], logits: Tensor, width: int) -> list[Choice]:
        rows = [NodeRow(draft.request, draft.path(node), i) for i, (draft, node) in enumerate(owners)]
        if self.sampling != "sampled" and all(self._is_argmax(row) for row in rows):
            ids, chances = likeliest(logits, width)
            return [Choice(Drawn(tokens), own) for tokens, own in zip(ids, chances, strict=True)]
        draws = [node + 1 for _, node in owners]
        drawn = draft_tokens(rows, logits, self.sampling, width, replacement=width > 1, draws=draws)
        return [Choice(one) for one in drawn]

    def _is_argmax(self, row: NodeRow) -> bool:
        """No option reorders this row's tokens and no noise is added: its draft is just the largest logits."""
        return (self.sampling == "greedy" or row.request.sampling_params.greedy) and not needs_edit(row)
