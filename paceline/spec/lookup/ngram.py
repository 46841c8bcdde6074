"""`ngram`, prompt lookup: the last n tokens stood somewhere before; draft what followed them there.

The longest n is tried first (`prompt_lookup_max` down to `prompt_lookup_min`) and the newest place wins. Where the node
budget holds more than one path, the next places become branches, joined into one trie.

On a GPU the same trees are made there, in rounds (ngram_rounds.py).
"""

import itertools
from collections.abc import Sequence

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.padded_decoder import PaddedDecoder
from paceline.ops.lookup import MAX_PLACES
from paceline.spec.engine_parts import EngineParts
from paceline.spec.lookup.ngram_index import NgramIndex, copy_from
from paceline.spec.lookup.ngram_rounds import NgramRoundDraft
from paceline.spec.proposer import Budget, StepContext
from paceline.spec.sized_rounds import RoundsProposer, SizedRounds, round_room
from paceline.spec.trie import Trie


class NgramProposer(RoundsProposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        size_by_price: bool = False,
    ) -> None:
        self._sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._indexes: dict[str, NgramIndex] = {}
        target = services.decoder
        if isinstance(target, PaddedDecoder) and min(largest.num_nodes, largest.max_depth) > 0:
            room = round_room(services, largest)
            self._device = NgramRoundDraft(self._sizes, room, services.max_model_len, services.device)
            self._rounds = SizedRounds("ngram", self._device, target, largest, size_by_price=size_by_price)

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(r, b) for r, b in zip(step.requests, self._within_size(budgets), strict=True)]

    def observe(self, step: StepContext) -> None:
        super().observe(step)
        for request in step.gone:
            self._indexes.pop(request.request_id, None)
            if self._rounds is not None:
                self._device.forget(request.request_id)

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        if budget.num_nodes < 1 or budget.max_depth < 1:
            return EMPTY_TREE
        tokens = request.token_ids
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._sizes)
        index.extend(tokens, len(tokens) - 1)  # n-grams that end at the last token would find themselves
        trie = Trie()
        for n, start in itertools.islice(index.matches(tokens), MAX_PLACES):
            path = copy_from(tokens, start, budget.max_depth)
            trie.add_path(path, n / (n + 1), budget.num_nodes)
            if len(trie) >= budget.num_nodes:
                break
        return trie.tree()
