"""The trees of the `suffix` method: find the places where the end of a text stood before, unfold what followed there.

`suffix.py` says what a tree is. `SuffixTrees` is the seam between the method and what makes its trees:
`PlainSuffixTrees` here, or its native twin in `native_suffix_trees.py`, which gives the same trees to the bit.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.tree import DraftTree
from paceline.spec.lookup.hit_rates import Reliability
from paceline.spec.lookup.ngram_index import NgramIndex, copy_from
from paceline.spec.lookup.past_outputs import SEPARATOR, PastOutputs
from paceline.spec.proposer import Budget

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  # n-grams indexed; between two of them the match is measured token by token
MAX_PLACES = 8  # that vote, of each source
MAX_FULL_MATCHES = 3  # places that match as far as we look: more of them only say the same
MAX_SHORTER = 3  # tokens by which a match may fall behind the longest one and still vote
AGREEMENT_WEIGHT = 2.0  # how much more a place weighs for each further token that matches


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    max_match: int  # tokens compared
    factor: float  # draft length over match length
    min_prob: float  # of a path
    max_cached_tokens: int  # of past outputs
    max_cached_outputs: int

    @property
    def sizes(self) -> list[int]:
        return [n for n in SIZES if n <= self.max_match]


Drafted = tuple[DraftTree, list[int]]  # a tree and, by node, the length of the match that it comes from


class SuffixTrees(Protocol):
    """Makes the trees of all requests. Rates are read from the `Reliability` that it was built with."""

    def add_output(self, tokens: Sequence[int]) -> None:
        """Keep a past output, for all requests that these trees are made for."""

    def draft(self, request_id: str, tokens: Sequence[int], budget: Budget) -> Drafted | None:
        """None where the end of `tokens` stood nowhere before. From call to call, `tokens` only grows."""

    def forget(self, request_id: str) -> None: ...


# A place is (continuation, match, weight): what followed there, and how many tokens before it agree with the request's
# end. Plain tuples: a tree is unfolded from dozens of places in a fraction of a millisecond.
Place = tuple[list[int], int, float]
# (-chance of the path, tie break, parent, depth, token, length of the match, own chance, places that vote for it)
Offer = tuple[float, int, int, int, int, int, float, list[Place]]


class PlainSuffixTrees:
    def __init__(self, options: SuffixOptions, reliability: Reliability) -> None:
        self._max_match, self._factor, self._min_prob = options.max_match, options.factor, options.min_prob
        self._sizes = options.sizes
        self._reliability = reliability
        self._past = PastOutputs(self._new_index, options.max_cached_tokens, options.max_cached_outputs)
        self._indexes: dict[str, NgramIndex] = {}

    def _new_index(self) -> NgramIndex:
        return NgramIndex(self._sizes)

    def add_output(self, tokens: Sequence[int]) -> None:
        self._past.add(tokens)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def draft(self, request_id: str, tokens: Sequence[int], budget: Budget) -> Drafted | None:
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = self._new_index()
        index.extend(tokens, len(tokens) - 1)
        for chunk in self._past.chunks:
            chunk.index.extend(chunk.text, len(chunk.text))
        places = list(self._places(tokens, index, budget.max_depth))
        return self._unfold(places, budget) if places else None

    def _places(self, tokens: Sequence[int], index: NgramIndex, max_depth: int) -> Iterator[Place]:
        suffix = tokens[-self._max_match :]
        longest = 0
        for text, searched in [(tokens, index), *((chunk.text, chunk.index) for chunk in self._past.chunks)]:
            num_full = 0
            for n, start in itertools.islice(searched.matches(suffix), MAX_PLACES):
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

    def _unfold(self, places: list[Place], budget: Budget) -> Drafted:
        """The likeliest nodes below the match, and for each the length of the match that it comes from."""
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
        rate = self._reliability.rate(length)
        for token, agreeing in voters.items():
            chance = rate if len(voters) == 1 else rate * _weight(agreeing) / total
            path = prob * chance
            if path >= self._min_prob:
                heapq.heappush(heap, (-path, len(heap), parent, depth, token, length, chance, agreeing))


def _weight(places: list[Place]) -> float:
    """Added one by one: `sum` rounds otherwise from Python 3.12 on, and the native twin gives the same bits."""
    total = 0.0
    for _, _, weight in places:
        total += weight
    return total
