"""Who is usually right: the chance that a drafted node holds, learned for each member of a merged tree.

A node's evidence is who drafted it, at which depth, at which rank among that member's own children, and how sure the
member said it was. Every guess is judged, those that were never verified too: the tokens that came say which child of
each node on their path was right. Estimates fall back from the particular to the general:

    member's own confidence -> (member, rank) -> (member, rank, confidence) -> (member, rank, confidence, depth)

each level counting as `STRENGTH` guesses for the next. Where several members drafted the same node, or others drafted
something else beside it, a last table corrects the best member's estimate for that constellation.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

STRENGTH = 6.0  # guesses that the more general estimate counts for
MEMORY = 4000.0  # guesses after which old evidence is halved
MAX_DEPTH, MAX_RANK, NUM_BUCKETS = 8, 7, 10
DEFAULT_CONFIDENCE = 0.3  # of a member that gives none, for its first child


@dataclass(frozen=True, slots=True)
class Guess:
    """One member's vote for a node."""

    member: str
    depth: int
    rank: int
    confidence: float | None


class Credit:
    def __init__(self) -> None:
        self._counts: dict[Hashable, list[float]] = {}  # evidence -> [hits, guesses]

    def chance(self, guesses: Sequence[Guess], contested: bool) -> float:
        """That a node with these votes holds, if its parent does. `contested`: others voted for a sibling."""
        best = max(self._member_chance(guess) for guess in guesses)
        if len(guesses) == 1 and not contested:
            return best
        return self._posterior(self._constellation(guesses, contested, best), best)

    def record(self, guesses: Sequence[Guess], contested: bool, hit: bool) -> None:
        best = max(self._member_chance(guess) for guess in guesses)
        if len(guesses) > 1 or contested:
            self._count(self._constellation(guesses, contested, best), hit)
        for guess in guesses:
            for key in _levels(guess):
                self._count(key, hit)

    def _member_chance(self, guess: Guess) -> float:
        chance = guess.confidence
        if chance is None:
            chance = DEFAULT_CONFIDENCE * 0.5**guess.rank
        for key in _levels(guess):
            chance = self._posterior(key, chance)
        return chance

    def _posterior(self, key: Hashable, prior: float) -> float:
        hits, guesses = self._counts.get(key, _NOTHING)
        return (hits + STRENGTH * prior) / (guesses + STRENGTH)

    def _count(self, key: Hashable, hit: bool) -> None:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0.0, 0.0]
        if counts[1] > MEMORY:
            counts[0] *= 0.5
            counts[1] *= 0.5
        counts[0] += hit
        counts[1] += 1.0

    @staticmethod
    def _constellation(guesses: Sequence[Guess], contested: bool, best: float) -> Hashable:
        voters = tuple(sorted((guess.member, min(guess.rank, 1)) for guess in guesses))
        return voters, contested, int(best * (NUM_BUCKETS - 1))


_NOTHING = [0.0, 0.0]


def _levels(guess: Guess) -> tuple[Hashable, Hashable, Hashable]:
    """The evidence of a guess, general first."""
    rank, depth = min(guess.rank, MAX_RANK), min(guess.depth, MAX_DEPTH)
    bucket = -1 if guess.confidence is None else int(guess.confidence * (NUM_BUCKETS - 1))
    return (guess.member, rank), (guess.member, rank, bucket), (guess.member, rank, bucket, depth)
