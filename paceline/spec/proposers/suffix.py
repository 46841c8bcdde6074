"""`suffix`: every place where the end of this text stood before votes on what comes next.

Places come from this request's own tokens and from past outputs of all requests. Together their continuations form the
suffix tree below the current match; the tree is never stored, only the part that is drafted is unfolded, likeliest
node first. A node's estimated probability is its parent's times

    (share of the places that agree) x (how often matches of this length were right so far)

where a place weighs more the longer it matches, and the second factor is learned as outputs go by. The draft is as
long as `factor` x match length allows and ends where the path's probability falls below `min_token_prob`.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.ngram_index import NgramIndex
from paceline.spec.past_outputs import SEPARATOR, PastOutputs
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.reliability import Reliability, walk
from paceline.spec.services import Services
from paceline.spec.trie import Trie

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  # n-grams indexed; between two of them the match is measured token by token
MAX_PLACES = 16  # that vote, of each source
PROMPT_TAIL = 4  # prompt tokens kept before a past output, so that its first tokens can be found
AGREEMENT_WEIGHT = 2.0  # how much more a place weighs for each further token that matches


@dataclass(slots=True)
class Place:
    """A continuation: text[at] is what it says comes next."""

    text: Sequence[int]
    start: int  # where it began: a place that reaches the end of the text goes round again
    at: int
    match: int  # tokens before `start` that agree with the end of the request

    def token(self) -> int:
        return self.text[self.at]

    def advanced(self) -> "Place":
        at = self.at + 1
        return Place(self.text, self.start, self.start if at == len(self.text) else at, self.match)


class SuffixProposer:
    name = "suffix"
    needs = Needs()

    def __init__(
        self,
        services: Services,
        largest: Budget,
        *,
        suffix_decoding_max_tree_depth: int,
        suffix_decoding_max_cached_requests: int,
        suffix_decoding_max_cached_tokens: int,
        suffix_decoding_max_spec_factor: float,
        suffix_decoding_min_token_prob: float,
    ) -> None:
        self._max_match = suffix_decoding_max_tree_depth
        self._factor = suffix_decoding_max_spec_factor
        self._min_prob = suffix_decoding_min_token_prob
        self._sizes = [n for n in SIZES if n <= self._max_match]
        self.past = PastOutputs(self._sizes, suffix_decoding_max_cached_tokens, suffix_decoding_max_cached_requests)
        self._indexes: dict[str, NgramIndex] = {}
        self._drafted: dict[str, tuple[DraftTree, list[int]]] = {}  # request id -> last tree, match length by node
        self.reliability = Reliability(self._max_match + 1)

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
            self._indexes.pop(request.request_id, None)
            self._drafted.pop(request.request_id, None)
            if request.finished and request.num_output_tokens:
                self.past.add(request.token_ids[max(0, request.num_prompt_tokens - PROMPT_TAIL) :])

    def _draft(self, request: Request, budget: Budget) -> DraftTree:
        tokens = request.token_ids
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._sizes)
        index.extend(tokens, len(tokens) - 1)
        places = list(self._places(tokens, index))
        if not places:
            return EMPTY_TREE
        tree, lengths = self._unfold(places, budget)
        self._drafted[request.request_id] = (tree, lengths)
        return tree

    def _places(self, tokens: Sequence[int], index: NgramIndex) -> Iterator[Place]:
        sources = [(tokens, index), *((chunk.text, chunk.index) for chunk in self.past.chunks)]
        suffix = tokens[-self._max_match :]
        for text, source in sources:
            for n, start in itertools.islice(source.matches(suffix), MAX_PLACES):
                if start < len(text) and text[start] != SEPARATOR:
                    yield Place(text, start, start, self._measure(text, start, suffix, n))

    @staticmethod
    def _measure(text: Sequence[int], start: int, suffix: Sequence[int], known: int) -> int:
        """How many tokens before `start` agree with the end of `suffix`; `known` of them are known to."""
        n = known
        while n < len(suffix) and n < start and text[start - 1 - n] == suffix[-1 - n]:
            n += 1
        return n

    def _unfold(self, places: list[Place], budget: Budget) -> tuple[DraftTree, list[int]]:
        trie = Trie()
        lengths: list[int] = []
        order = itertools.count()  # breaks ties, so that places are never compared
        heap: list[tuple[float, int, int, int, int, float, list[Place]]] = []

        def push_children(parent: int, depth: int, prob: float, here: list[Place]) -> None:
            longest = max(place.match for place in here)
            if depth > min(budget.max_depth, max(1, int(self._factor * longest))):
                return
            length = min(longest + depth - 1, self._max_match)
            votes, voters = self._vote(here, longest)
            total = sum(votes.values())
            for token, vote in votes.items():
                share = vote / total * self.reliability.rate(length)
                if prob * share >= self._min_prob:
                    entry = (-prob * share, next(order), parent, token, length, share, voters[token])
                    heapq.heappush(heap, entry)

        depths = {-1: 0}
        push_children(-1, 1, 1.0, places)
        while heap and len(trie) < budget.num_nodes:
            negative, _, parent, token, length, share, voters = heapq.heappop(heap)
            node = trie.add(parent, token, share)
            depths[node] = depths[parent] + 1
            lengths.append(length)
            following = [place.advanced() for place in voters]
            following = [place for place in following if place.token() != SEPARATOR]
            if following:
                push_children(node, depths[node] + 1, -negative, following)
        return trie.tree(), lengths

    @staticmethod
    def _vote(places: list[Place], longest: int) -> tuple[dict[int, float], dict[int, list[Place]]]:
        votes: dict[int, float] = {}
        voters: dict[int, list[Place]] = {}
        for place in places:
            token = place.token()
            votes[token] = votes.get(token, 0.0) + AGREEMENT_WEIGHT ** (place.match - longest)
            voters.setdefault(token, []).append(place)
        return votes, voters
