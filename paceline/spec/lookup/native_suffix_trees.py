"""The trees of the `suffix` method, made natively (ops/native/suffix.py): the twin of `PlainSuffixTrees`."""

from collections.abc import Sequence

from paceline.ops.native.suffix import NativeSuffix, NativeText
from paceline.spec.lookup.hit_rates import Reliability
from paceline.spec.lookup.past_outputs import PastOutputs
from paceline.spec.lookup.suffix_trees import Drafted, SuffixOptions
from paceline.spec.proposer import Budget


class NativeSuffixTrees:
    def __init__(self, options: SuffixOptions, reliability: Reliability) -> None:
        self._sizes = options.sizes
        self._past = PastOutputs(self._new_text, options.max_cached_tokens, options.max_cached_outputs)
        self._num_taken_in = 0  # of the past outputs
        self._texts: dict[str, NativeText] = {}
        self._native = NativeSuffix(
            max_match=options.max_match,
            factor=options.factor,
            min_prob=options.min_prob,
            hits=reliability.hits,
            guesses=reliability.guesses,
        )

    def _new_text(self) -> NativeText:
        return NativeText(self._sizes)

    def add_output(self, tokens: Sequence[int]) -> None:
        self._past.add(tokens)

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def draft(self, request_id: str, tokens: Sequence[int], budget: Budget) -> Drafted | None:
        own = self._texts.get(request_id)
        if own is None:
            own = self._texts[request_id] = self._new_text()
        if self._num_taken_in != self._past.num_added:
            self._take_in_past()
        return self._native.draft(own, tokens, budget.num_nodes, budget.max_depth)

    def _take_in_past(self) -> None:
        for chunk in self._past.chunks:
            if len(chunk.text) > chunk.index.num_tokens:
                chunk.index.extend(chunk.text)
        self._native.set_chunks([chunk.index for chunk in self._past.chunks])
        self._num_taken_in = self._past.num_added
