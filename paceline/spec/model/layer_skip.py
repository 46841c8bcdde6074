"""`layer_skip`, self-speculation: some of the target's own layers draft, all of them verify.

The draft reads the target's KV, which is complete up to the last token, so there is nothing to keep, to catch up on, or
to go stale. What it writes past the last token is written again by the pass that verifies. Which layers to run
decides everything: `paceline tune layer-skip` searches them for a model and stores the answer.
"""

from collections.abc import Sequence

from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.models.aliases import cache_dir
from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.engine_parts import EngineParts
from paceline.spec.model.chain_rounds import own_layers_draft
from paceline.spec.model.layer_search import load_stored, stored_path
from paceline.spec.model.model_drafter import ModelDrafter
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.sized_rounds import RoundsProposer, SizedRounds, round_room


class LayerSkipProposer(RoundsProposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        draft_layers: Sequence[int] | None,
        draft_sampling: str | None,
        tree_widths: Sequence[int] | None,
        size_by_price: bool = False,
    ) -> None:
        assert services.decoder is not None and services.kv_cache is not None
        config = services.decoder.config
        tuned = draft_layers if draft_layers is not None else load_stored(stored_path(cache_dir(), config))
        self.layers = check_layers(tuned, config.num_layers)
        self._drafter = ModelDrafter(
            services.decoder,
            services.kv_cache,
            services.block_size,
            layers=self.layers,
            widths=tree_widths,
            sampling=draft_sampling,
        )
        self.needs = Needs(lookahead_slots=largest.num_nodes, draft_probs=draft_sampling == "sampled")

        target = services.decoder
        if isinstance(target, PaddedDecoder) and tree_widths is None and draft_sampling != "sampled":
            draft = own_layers_draft(target, self.layers, round_room(services, largest), draft_sampling)
            self._rounds = SizedRounds("layer_skip", draft, target, largest, size_by_price=size_by_price)

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        starts = [request.num_tokens - 1 for request in step.requests]
        return self._drafter.draft(step.requests, self._within_size(budgets), starts)


def check_layers(layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers to draft with; without a choice all but every fourth of the middle ones, which are missed least."""
    if layers is None:
        skipped = range(num_layers // 5, num_layers - num_layers // 5, 4) if num_layers > 4 else range(0)
        return [layer for layer in range(num_layers) if layer not in skipped]
    bad = [layer for layer in layers if not 0 <= layer < num_layers]
    if bad:
        raise InvalidOptionError(f"draft_layers {bad} do not exist: the target has layers 0 to {num_layers - 1}")
    return sorted(set(layers))
