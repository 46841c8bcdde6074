"""`draft_model`: a smaller model drafts, token by token or level by level.

Its keys and values lie in a tensor of its own with as many slots as the target's, addressed by the same block tables.
How far a request's KV is valid is found by comparing what was fed with what the request holds now, so an accepted draft
costs nothing, a rejected one is overwritten, and whatever was missed meanwhile (a prompt found in the prefix cache,
steps without speculation) is caught up on before the next draft.

With `num_draft_layers` instead of a model, the target's own first layers draft, with its norm and head. Their KV is the
target's, so such a draft costs no memory at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.spec.model_drafter import ModelDrafter
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.services import Services


@dataclass(slots=True)
class Fed:
    """What the drafting model has KV for: tokens [0, num_tokens), then `chain` in the slots behind them."""

    num_tokens: int = 0
    chain: list[int] = field(default_factory=list)

    def valid(self, token_ids: Sequence[int]) -> int:
        """How many tokens of the request, as it is now, have their KV."""
        end = self.num_tokens
        for token in self.chain:
            if end >= len(token_ids) or token_ids[end] != token:
                break
            end += 1
        return min(end, len(token_ids) - 1)  # the last token is always computed: its logits start the draft


class DraftModelProposer:
    name = "draft_model"

    def __init__(
        self,
        services: Services,
        largest: Budget,
        *,
        model: Any,
        num_draft_layers: int | None,
        draft_sampling: str,
        tree_widths: Sequence[int] | None,
    ) -> None:
        self._fed: dict[str, Fed] | None = None if model is None else {}  # None: the target's own KV is used
        self._is_chain = tree_widths is None
        self.needs = Needs(lookahead_slots=largest.num_nodes, draft_probs=draft_sampling == "sampled")
        self._drafter = (
            own_layers(services, num_draft_layers, draft_sampling, tree_widths)
            if model is None
            else separate_model(services, model, draft_sampling, tree_widths)
        )

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        starts = [self._start(request) for request in step.requests]
        trees = self._drafter.draft(step.requests, budgets, starts)
        if self._fed is not None:
            for request, tree in zip(step.requests, trees, strict=True):
                # Of a chain every token but the last was fed, in the slots it would have if it were accepted.
                chain = tree.token_ids[:-1] if self._is_chain else []
                if tree:
                    self._fed[request.request_id] = Fed(request.num_tokens, chain)
        return trees

    def observe(self, step: StepContext) -> None:
        if self._fed is not None:
            for request in step.gone:
                self._fed.pop(request.request_id, None)

    def _start(self, request: Request) -> int:
        if self._fed is None:
            return request.num_tokens - 1
        return self._fed.get(request.request_id, Fed()).valid(request.token_ids)


def own_layers(services: Services, num_layers: int | None, sampling: str, widths: Sequence[int] | None) -> ModelDrafter:
    assert services.decoder is not None and services.kv_cache is not None and num_layers is not None
    available = services.decoder.config.num_layers
    if num_layers > available:
        raise InvalidOptionError(f"num_draft_layers is {num_layers}, but the target has only {available} layers")
    return ModelDrafter(
        services.decoder,
        services.kv_cache,
        services.block_size,
        layers=range(num_layers),
        widths=widths,
        sampling=sampling,
    )


def separate_model(services: Services, model: Any, sampling: str, widths: Sequence[int] | None) -> ModelDrafter:
    from paceline.models.loader import load_model

    loaded = load_model(model, num_threads=services.num_threads, quiet=True) if isinstance(model, str) else model
    check_vocabulary(services, loaded)
    decoder = loaded.decoder
    config = decoder.config
    shape = (config.num_layers, 2, services.num_slots, config.num_kv_heads, config.head_dim)
    kv_cache = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
    return ModelDrafter(
        decoder, kv_cache, services.block_size, widths=widths, sampling=sampling, vocab_size=services.vocab_size
    )


def check_vocabulary(services: Services, loaded: Any) -> None:
    """Token ids must mean the same to both models; rows past the target's vocabulary are never drafted."""
    theirs = loaded.decoder.config.vocab_size
    if theirs < services.vocab_size:
        raise InvalidOptionError(
            f"the draft model has a vocabulary of {theirs} tokens, the target one of {services.vocab_size}: "
            "they cannot exchange token ids; choose a draft model of the same family"
        )
