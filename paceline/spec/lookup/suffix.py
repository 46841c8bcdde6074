"""`suffix`: every place where the end of this text stood before votes on what comes next.

Places come from this request's own tokens and from past outputs of the requests that share its `cache_salt`. Together
their continuations form the suffix tree below the current match; the tree is never stored, only the part that is
drafted is unfolded, likeliest node first. A node's estimated probability is its parent's times

    (share of the places that agree) x (how often matches of this length were right so far)

where a place weighs more the longer it matches, and the second factor is learned as outputs go by. The draft is as
long as `factor` x match length allows and ends where the path's probability falls below `min_token_prob`.
"""

from collections.abc import Sequence

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.ops.native.suffix import suffix_available
from paceline.spec.engine_parts import EngineParts
from paceline.spec.lookup.by_salt import BySalt
from paceline.spec.lookup.hit_rates import Reliability, walk
from paceline.spec.lookup.native_suffix_trees import NativeSuffixTrees
from paceline.spec.lookup.suffix_trees import Drafted, PlainSuffixTrees, SuffixOptions, SuffixTrees
from paceline.spec.proposer import Budget, Proposer, StepContext

PROMPT_TAIL = 4  # prompt tokens kept before a past output, so that its first tokens can be found


class SuffixProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        suffix_decoding_max_tree_depth: int,
        suffix_decoding_max_cached_requests: int,
        suffix_decoding_max_cached_tokens: int,
        suffix_decoding_max_spec_factor: float,
        suffix_decoding_min_token_prob: float,
    ) -> None:
        options = SuffixOptions(
            max_match=suffix_decoding_max_tree_depth,
            factor=suffix_decoding_max_spec_factor,
            min_prob=suffix_decoding_min_token_prob,
            max_cached_tokens=suffix_decoding_max_cached_tokens,
            max_cached_outputs=suffix_decoding_max_cached_requests,
        )
        self.reliability = Reliability(options.max_match)
        make_trees = NativeSuffixTrees if suffix_available() else PlainSuffixTrees
        self._trees: BySalt[SuffixTrees] = BySalt(lambda: make_trees(options, self.reliability))
        self._drafted: dict[str, Drafted] = {}  # by request id: the last tree

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(r, b) for r, b in zip(step.requests, budgets, strict=True)]

    def observe(self, step: StepContext) -> None:
        for verified in step.passes:
            drafted = self._drafted.pop(verified.request.request_id, None)
            if drafted is not None:
                tree, lengths = drafted
                for child, hit in walk(tree, verified.new_token_ids):
                    self.reliability.record(lengths[child], hit)
        for request in step.gone:
            trees = self._trees[request.cache_salt]
            trees.forget(request.request_id)
            self._drafted.pop(request.request_id, None)
            if request.finished and request.num_output_tokens:
                trees.add_output(request.token_ids[max(0, request.num_prompt_tokens - PROMPT_TAIL) :])

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        if budget.num_nodes < 1 or budget.max_depth < 1:
            return EMPTY_TREE
        drafted = self._trees[request.cache_salt].draft(request.request_id, request.token_ids, budget)
        if drafted is None:
            return EMPTY_TREE
        self._drafted[request.request_id] = drafted
        return drafted[0]
