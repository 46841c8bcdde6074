"""`medusa`: heads on the target's last hidden state guess several positions ahead, all at once.

The hidden state (after the final norm) of the token before the last one gave the last token; head i guesses the token
i + 1 places after it. The guesses of a depth do not depend on those before, so the tree holds the likeliest
combinations. There is nothing to keep but one vector per request.

On a GPU the same trees are made there, in rounds (medusa_rounds.py).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.drafters.load import load_network
from paceline.models.drafters.medusa import Medusa
from paceline.models.drafters.paged import Linear, make_linear
from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.device_drafts import MAX_WIDTH
from paceline.spec.feature.draft_growth import least_log_prob, product_tree, sampled_chain
from paceline.spec.feature.feature_drafter import draft_scores, placement, target_of
from paceline.spec.feature.medusa_rounds import MedusaRoundDraft
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.sized_rounds import RoundsProposer, SizedRounds, round_room


class MedusaProposer(RoundsProposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        model: str | None,
        draft_sampling: str | None,
        draft_width: int,
        draft_min_prob: float,
        size_by_price: bool = False,
    ) -> None:
        target = target_of(services)
        network: Medusa = load_network("medusa", model, target)
        place = placement(services)
        self._blocks: list[list[Linear]] = [
            [make_linear(block.linear, place) for block in network.residual_blocks(i)]
            for i in range(len(network.blocks))
        ]
        self._heads = [make_linear(network.head(i), place) for i in range(len(network.heads))]
        self._scores = draft_scores(services, network.d2t, draft_sampling)
        self._width, self._lowest = draft_width, least_log_prob(draft_min_prob)
        self._layer = target.config.num_layers + 1
        self._hidden: dict[str, tuple[int, Tensor]] = {}  # request id -> position and hidden state of its newest row
        self._needs = Needs(hidden_layers=(self._layer,), draft_probs=draft_sampling == "sampled")
        if isinstance(target, PaddedDecoder) and draft_sampling != "sampled" and draft_width <= MAX_WIDTH:
            room = round_room(services, largest)
            draft = MedusaRoundDraft(
                network, self._layer, self._scores, room, draft_width, self._lowest, place.device, target.hidden_dtype
            )
            self._rounds = SizedRounds("medusa", draft, target, largest, size_by_price=size_by_price)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Nothing while drafts do not pay: then a pass is one of plain decoding in every respect."""
        return Needs() if self.skips_next_step() else self._needs

    def observe(self, step: StepContext) -> None:
        super().observe(step)
        if step.hidden is not None and step.drafted is None:
            column = step.hidden_layers.index(self._layer)
            for verified in step.passes:
                last = verified.num_committed - 1
                if verified.accepted:
                    last += 1 + verified.accepted[-1]
                position = verified.start + verified.num_committed + len(verified.accepted) - 1
                self._hidden[verified.request.request_id] = position, step.hidden[verified.rows.start + last, column]
        for request in step.gone:
            self._hidden.pop(request.request_id, None)

    @torch.no_grad()
    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        trees, budgets = [EMPTY_TREE] * len(step.requests), self._within_size(budgets)
        ready = [
            (i, request, budget)
            for i, (request, budget) in enumerate(zip(step.requests, budgets, strict=True))
            if self._knows(request) and min(budget.num_nodes, budget.max_depth) > 0
        ]
        if not ready:
            return trees
        depth = min(len(self._blocks), max(budget.max_depth for _, _, budget in ready))
        hidden = torch.stack([self._hidden[request.request_id][1] for _, request, _ in ready]).float()
        logits = self._logits(hidden, depth)  # [depth * requests, draft vocab]
        rows = [(request, d) for d in range(depth) for _, request, _ in ready]
        scored = self._scores.top(rows, logits, self._width)
        for j, (i, _, budget) in enumerate(ready):
            own = np.arange(j, len(rows), len(ready))[: budget.max_depth]
            if scored.probs:
                trees[i] = sampled_chain(scored, own, budget)
            else:
                trees[i] = product_tree(scored.token_ids[own], scored.log_probs[own], budget, self._lowest)
        return trees

    def _knows(self, request: Request) -> bool:
        position, _ = self._hidden.get(request.request_id, (-1, None))
        return position == request.num_tokens - 2 and position >= 0

    def _logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[requests, hidden] -> [depth * requests, draft vocab], depth by depth"""
        features = []
        for blocks in self._blocks[:depth]:
            x = hidden
            for block in blocks:
                x = x + torch.nn.functional.silu(block(x))
            features.append(x)
        if len(self._heads) == 1:
            return self._heads[0](torch.cat(features))
        return torch.cat([head(x) for head, x in zip(self._heads, features, strict=False)])
