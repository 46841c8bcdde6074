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
from paceline.spec.ngram_index import NgramIndex, copy_from
from paceline.spec.past_outputs import SEPARATOR, PastOutputs
from paceline.spec.proposer import Budget, Needs, StepContext
from paceline.spec.reliability import Reliability, walk
from paceline.spec.services import Services

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  # n-grams indexed; between two of them the match is measured token by token
MAX_PLACES = 8  # that vote, of each source
MAX_FULL_MATCHES = 3  # places that match as far as we look: more of them only say the same
MAX_SHORTER = 3  # tokens by which a match may fall behind the longest one and still vote
PROMPT_TAIL = 4  # prompt tokens kept before a past output, so that its first tokens can be found
AGREEMENT_WEIGHT = 2.0  # how much more a place weighs for each further token that matches


# A place is (continuation, match, weight): what followed there, and how many tokens before it agree with the request's
# end. Plain tuples: a tree is unfolded from dozens of places in a fraction of a millisecond.
Place = tuple[list[int], int, float]
# (-chance of the path, tie break, parent, depth, token, length of the match, own chance, places that vote for it)
Offer = tuple[float, int, int, int, int, int, float, list[Place]]


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
        if budget.num_nodes < 1 or budget.max_depth < 1:
            return EMPTY_TREE
        tokens = request.token_ids
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._sizes)
        index.extend(tokens, len(tokens) - 1)
        places = list(self._places(tokens, index, budget.max_depth))
        if not places:
            return EMPTY_TREE
        tree, lengths = self._unfold(places, budget)
        self._drafted[request.request_id] = (tree, lengths)
        return tree

    def _places(self, tokens: Sequence[int], index: NgramIndex, max_depth: int) -> Iterator[Place]:
        suffix = tokens[-self._max_match :]
        longest = 0
        found = [(tokens, index.matches(suffix)), *((chunk.text, chunk.matches(suffix)) for chunk in self.past.chunks)]
        for text, matches in found:
            num_full = 0
            for n, start in itertools.islice(matches, MAX_PLACES):
                if n < longest - MAX_SHORTER:
                    break  # longest first: the rest would hardly weigh anything
                if text[start] == SEPARATOR:  # no place ends at the last token, so `start` is inside the text
                    continue
                match = self._measure(text, start, suffix, n)
                longest = max(longest, match)
                yield self._continuation(text, start, max_depth), match, AGREEMENT_WEIGHT**match
                num_full += match == len(suffix)
                if num_full == MAX_FULL_MATCHES:
                    break

    @staticmethod
    def _continuation(text: Sequence[int], start: int, count: int) -> list[int]:
        """What followed: to the end of that output, or, at the end of this text, round again."""
        copied = copy_from(text, start, count)
        return copied[: copied.index(SEPARATOR)] if SEPARATOR in copied else copied

    @staticmethod
    def _measure(text: Sequence[int], start: int, suffix: Sequence[int], known: int) -> int:
        """How many tokens before `start` agree with the end of `suffix`; `known` of them are known to."""
        n = known
        while n < len(suffix) and n < start and text[start - 1 - n] == suffix[-1 - n]:
            n += 1
        return n

    def _unfold(self, places: list[Place], budget: Budget) -> tuple[DraftTree, list[int]]:
        """The likeliest nodes below the match, and for each the length of the match that it rests on."""
        token_ids: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        lengths: list[int] = []
        heap: list[Offer] = []
        self._offer(heap, -1, 1, 1.0, places)
        while heap and len(token_ids) < budget.num_nodes:
            negative, _, parent, depth, token, length, chance, voters = heapq.heappop(heap)
            token_ids.append(token)
            parents.append(parent)
            confidence.append(chance)
            lengths.append(length)
            if depth < budget.max_depth:
                self._offer(heap, len(token_ids) - 1, depth + 1, -negative, voters)
        return DraftTree(token_ids, parents, confidence=confidence), lengths

    def _offer(self, heap: list[Offer], parent: int, depth: int, prob: float, places: list[Place]) -> None:
        """Offer the children of `parent`: one for each token that a place votes for."""
        if len(places) == 1:  # the most frequent case, below the first fork
            continuation, longest, total = places[0]
            if len(continuation) < depth:
                return
            voters = {continuation[depth - 1]: places}
        else:
            voters, longest, total = {}, 0, 0.0
            for place in places:
                continuation, match, weight = place
                if len(continuation) < depth:
                    continue
                longest = match if match > longest else longest
                total += weight
                token = continuation[depth - 1]
                if token in voters:
                    voters[token].append(place)
                else:
                    voters[token] = [place]
        if depth > 1 and depth > int(self._factor * longest):
            return
        length = min(longest + depth - 1, self._max_match)
        rate = self.reliability.rate(length)
        for token, agreeing in voters.items():
            chance = rate if len(voters) == 1 else rate * sum([place[2] for place in agreeing]) / total
            path = prob * chance
            if path >= self._min_prob:
                heapq.heappush(heap, (-path, len(heap), parent, depth, token, length, chance, agreeing))
