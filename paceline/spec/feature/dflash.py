"""`dflash`: a block of masks behind the last token is filled in with one pass of a small network.

With n tokens the block stands at positions n - 1 (the last token), n, n + 1, ...; it sees the target's fused hidden
states of positions 0 .. n - 2, whose keys and values are kept at the same slots as the target's, and itself, in both
directions. All of the block's guesses come at once, so the tree holds their likeliest combinations.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.drafters.dflash import DFlash
from paceline.models.drafters.load import load_network
from paceline.models.drafters.paged import make_layers, make_linear
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.block_rows import FeatureBlockRows
from paceline.spec.feature.draft_growth import least_log_prob, product_tree, sampled_chain
from paceline.spec.feature.feature_drafter import (
    SCRATCH_SLOTS,
    RowBuilder,
    chunks,
    context_rows,
    draft_scores,
    groups,
    placement,
    target_of,
    token_tensor,
)
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.proposer import Budget, Needs, Proposer, StepContext


class DFlashProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        model: str | None,
        draft_sampling: str | None,
        draft_width: int,
        draft_min_prob: float,
    ) -> None:
        self._target = target_of(services)
        network: DFlash = load_network("dflash", model, self._target)
        config, place = network.config, placement(services)
        self._size = config.block_size
        self._first_scratch = services.num_slots
        num_slots = services.num_slots + max(SCRATCH_SLOTS, self._size)
        self._fc = make_linear(network.fc, place)
        self._head = make_linear(network.lm_head, place)
        self._layers = make_layers(config.layer, list(network.layers), num_slots, place)
        self._network = network.to(place.device)
        self._masks = [config.mask_token_id] * (self._size - 1)
        self._scores = draft_scores(services, network.d2t, draft_sampling)
        self._width, self._lowest = draft_width, least_log_prob(draft_min_prob)
        self._queue = FeatureQueue(config.hidden_layers, services)
        self._rows = FeatureBlockRows("dflash", network, self._layers.kv_cache, self._queue, services, self._flush)
        self._known: dict[str, int] = {}  # request id -> position of its newest feature
        self.needs = Needs(hidden_layers=config.hidden_layers, draft_probs=draft_sampling == "sampled")

    def observe(self, step: StepContext) -> None:
        if not self._queue.follow(step, self._flush):
            self._known.clear()
        for request in step.gone:
            self._known.pop(request.request_id, None)

    def block_rows(self) -> list[FeatureBlockRows]:
        return [self._rows]

    @torch.no_grad()
    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        self._flush()
        trees = [EMPTY_TREE] * len(step.requests)
        ready = [
            (i, request, budget)
            for i, (request, budget) in enumerate(zip(step.requests, budgets, strict=True))
            if self._known.get(request.request_id) == request.num_tokens - 2
            and request.num_tokens > 1
            and min(budget.num_nodes, budget.max_depth) > 0
        ]
        for group in groups(ready, self._size):
            drafted = self._draft([r for _, r, _ in group], [b for _, _, b in group])
            for (i, _, _), tree in zip(group, drafted, strict=True):
                trees[i] = tree
        return trees

    @torch.no_grad()
    def _flush(self) -> None:
        """Take in the queued features: keys and values of the context, in every layer."""
        queued = self._queue.take()
        if queued is None:
            return
        for rows in chunks(len(queued), self._layers.kv_cache.device):
            context = self._network.hidden_norm(self._fc(queued.features[rows].flatten(1).float()))
            for layer in range(len(self._network.layers)):
                self._layers.store(layer, context, context_rows(queued.positions[rows], queued.slots[rows]))
        for name, row in queued.last_rows.items():
            self._known[name] = int(queued.positions[row])

    def _draft(self, requests: list[Request], budgets: list[Budget]) -> list[DraftTree]:
        depth = min(self._size - 1, max(budget.max_depth for budget in budgets))
        states = self._blocks(requests)[:, 1 : 1 + depth]  # [requests, depth, hidden]
        logits = self._head(self._network.norm(states.reshape(-1, states.shape[-1])))
        scored = self._scores.top([(r, d) for r in requests for d in range(depth)], logits, self._width)
        trees = []
        for i, budget in enumerate(budgets):
            own = np.arange(i * depth, i * depth + min(depth, budget.max_depth))
            if scored.probs:
                trees.append(sampled_chain(scored, own, budget))
            else:
                trees.append(product_tree(scored.token_ids[own], scored.log_probs[own], budget, self._lowest))
        return trees

    def _blocks(self, requests: list[Request]) -> Tensor:
        """[requests, block size, hidden], before the final norm"""
        builder = RowBuilder.of([self._queue.context(request) for request in requests])
        size = self._size
        slots = [
            list(range(self._first_scratch + i * size, self._first_scratch + (i + 1) * size))
            for i in range(len(requests))
        ]
        rows = builder.rows(
            [i for i in range(len(requests)) for _ in range(size)],
            [r.num_tokens - 1 + k for r in requests for k in range(size)],
            [slot for own in slots for slot in own],
            [own for own in slots for _ in range(size)],  # every row of a block sees the whole block
        )
        tokens = [token for r in requests for token in (r.token_ids[-1], *self._masks)]
        x = self._target.vocabulary_rows(token_tensor(tokens))
        for i, layer in enumerate(self._network.decoder_layers()):
            x = self._layers.forward(i, layer.input_layernorm(x), x, rows)
        return x.view(len(requests), size, -1)
