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

from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.spec.ngram_index import NgramIndex
from paceline.spec.past_outputs import SEPARATOR, PastOutputs
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.reliability import Reliability, walk
from paceline.spec.services import Services
from paceline.spec.trie import Trie

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  # n-grams indexed; between two of them the match is measured token by token
MAX_PLACES = 8  # that vote, of each source
MAX_FULL_MATCHES = 3  # places that match as far as we look: more of them only say the same
MAX_SHORTER = 3  # tokens by which a match may fall behind the longest one and still vote
PROMPT_TAIL = 4  # prompt tokens kept before a past output, so that its first tokens can be found
AGREEMENT_WEIGHT = 2.0  # how much more a place weighs for each further token that matches


# A place is (text, at, start, match, weight): text[at] is what it says comes next; it began at `start` (where a place
# that reaches the end of the text goes round again), and `match` tokens before `start` agree with the request's end.
# Plain tuples: a tree is unfolded from dozens of places in a fraction of a millisecond.
Place = tuple[Sequence[int], int, int, int, float]


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
        longest = 0
        for text, source in sources:
            num_full = 0
            for n, start in itertools.islice(source.matches(suffix), MAX_PLACES):
                if n < longest - MAX_SHORTER:
                    break  # longest first: the rest would hardly weigh anything
                if text[start] == SEPARATOR:  # no place ends at the last token, so `start` is inside the text
                    continue
                match = self._measure(text, start, suffix, n)
                longest = max(longest, match)
                yield text, start, start, match, AGREEMENT_WEIGHT**match
                num_full += match == len(suffix)
                if num_full == MAX_FULL_MATCHES:
                    break

    @staticmethod
    def _measure(text: Sequence[int], start: int, suffix: Sequence[int], known: int) -> int:
        """How many tokens before `start` agree with the end of `suffix`; `known` of them are known to."""
        n = known
        while n < len(suffix) and n < start and text[start - 1 - n] == suffix[-1 - n]:
            n += 1
        return n

    def _unfold(self, places: list[Place], budget: Budget) -> tuple[DraftTree, list[int]]:
        """The likeliest nodes below the match, and for each the length of the match that it rests on."""
        trie = Trie()
        lengths: list[int] = []
        # (-chance of the path, tie break, parent, depth, token, length, own chance, places)
        heap: list[tuple[float, int, int, int, int, int, float, list[Place]]] = []
        self._push(heap, -1, 1, 1.0, places, budget.max_depth)
        while heap and len(trie) < budget.num_nodes:
            negative, _, parent, depth, token, length, chance, voters = heapq.heappop(heap)
            node = trie.add(parent, token, chance)
            lengths.append(length)
            following = []
            for text, at, start, match, weight in voters:
                at = at + 1 if at + 1 < len(text) else start
                if text[at] != SEPARATOR:
                    following.append((text, at, start, match, weight))
            if following:
                self._push(heap, node, depth + 1, -negative, following, budget.max_depth)
        return trie.tree(), lengths

    def _push(
        self,
        heap: list[tuple[float, int, int, int, int, int, float, list[Place]]],
        parent: int,
        depth: int,
        prob: float,
        places: list[Place],
        max_depth: int,
    ) -> None:
        """Offer the children of `parent`: one for each token that a place votes for."""
        if depth > max_depth:
            return
        longest = places[0][3] if len(places) == 1 else max(place[3] for place in places)
        if depth > max(1, int(self._factor * longest)):
            return
        length = min(longest + depth - 1, self._max_match)
        if len(places) == 1:  # the most frequent case, below the first fork
            chance, text, at = self.reliability.rate(length), places[0][0], places[0][1]
            if prob * chance >= self._min_prob:
                heapq.heappush(heap, (-prob * chance, len(heap), parent, depth, text[at], length, chance, places))
            return
        voters: dict[int, list[Place]] = {}
        for place in places:
            voters.setdefault(place[0][place[1]], []).append(place)
        scale = self.reliability.rate(length) / sum(place[4] for place in places)
        for token, agreeing in voters.items():
            chance = scale * sum(place[4] for place in agreeing)
            if prob * chance >= self._min_prob:
                entry = (-prob * chance, len(heap), parent, depth, token, length, chance, agreeing)
                heapq.heappush(heap, entry)
