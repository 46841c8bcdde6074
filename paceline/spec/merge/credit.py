"""The chance that a drafted node is accepted, learned for each member of a merged tree.

A node's evidence is which member drafted it, at which depth, at which rank among that member's own children, and how
sure the member said it was. Every guess is judged, also those that were not verified: the tokens that the target
emitted show which child of each node on their path was right. Estimates fall back from the particular to the general:

    member's own confidence -> (member, rank) -> (member, rank, confidence) -> (member, rank, confidence, depth)

each level counting as `STRENGTH` guesses for the next. Where several members drafted the same node, or others drafted
something else beside it, a last table corrects the best member's estimate for that combination.

What was learned can be reused: `rows()` of one engine, or of a replay, starts the next one (option `credit` of
`merge`).
"""

from collections.abc import Hashable, Sequence
from typing import Any

from paceline.errors import InvalidOptionError

STRENGTH = 6.0  # guesses that the more general estimate counts for
MEMORY = 4000.0  # guesses after which old evidence is halved
MAX_DEPTH, MAX_RANK, NUM_BUCKETS = 8, 7, 10
DEFAULT_CONFIDENCE = 0.3  # of a member that gives none, for its first child
REFRESH_EVERY = 256  # guesses judged before estimates are computed again: they change slowly, and computing takes time

# One member's vote for a node: (member, rank, bucket of its confidence, depth). Its prefixes are the evidence levels.
Guess = tuple[str, int, int, int]
Row = tuple[str, int, int, int, float, float]  # a guess, how often it was right, how often it was made

START_GUESSES = 256.0  # the most that reused rows count for: what is learned here soon weighs more


def make_guess(member: str, depth: int, rank: int, confidence: float | None) -> Guess:
    if confidence is None:
        confidence = DEFAULT_CONFIDENCE * 0.5**rank
    bucket = int(confidence * NUM_BUCKETS)
    return member, min(rank, MAX_RANK), min(bucket, NUM_BUCKETS - 1), min(depth, MAX_DEPTH)


def check_rows(name: str, value: Any) -> tuple[Row, ...]:
    """The option's rows, each a vote with its counts."""
    if not isinstance(value, list | tuple):
        raise InvalidOptionError(f"{name} must be a list of rows, as `paceline tune tree` writes it, got {value!r}")
    for row in value:
        counts = row[1:] if isinstance(row, list | tuple) and len(row) == 6 and isinstance(row[0], str) else [-1]
        numbers = all(isinstance(count, int | float) and 0 <= count < 1e12 for count in counts)
        if not numbers or row[4] > row[5]:
            raise InvalidOptionError(
                f"{name} has rows [member, rank, confidence bucket, depth, hits, guesses], "
                f'such as ["ngram", 0, 7, 1, 30, 40]; got {row!r}'
            )
    return tuple((str(m), int(r), int(b), int(d), float(hits), float(n)) for m, r, b, d, hits, n in value)


class Credit:
    def __init__(self, start: Sequence[Row] = ()) -> None:
        self._counts: dict[Hashable, list[float]] = {}  # evidence -> [hits, guesses]
        for row in start:
            for level in (2, 3, 4):
                counts = self._counts.setdefault(row[:level], [0.0, 0.0])
                counts[0] += row[4]
                counts[1] += row[5]
        for counts in self._counts.values():
            share = START_GUESSES / max(counts[1], START_GUESSES)
            counts[:] = counts[0] * share, counts[1] * share
        self._chances: dict[Guess, float] = {}  # estimates since the last refresh
        self._num_judged = 0

    def rows(self) -> list[Row]:
        """What was learned of the members, to start another engine with. Combinations are not included."""
        return [
            (*key, hits, guesses)
            for key, (hits, guesses) in sorted(self._counts.items(), key=lambda item: str(item[0]))
            if isinstance(key, tuple) and len(key) == 4
        ]

    def chance(self, guesses: Sequence[Guess], contested: bool) -> float:
        """That a node with these votes is accepted, if its parent is. `contested`: others voted for a sibling."""
        if len(guesses) == 1 and not contested:
            return self._member_chance(guesses[0])
        best = max(self._member_chance(guess) for guess in guesses)
        return self._posterior(_combination(guesses, contested, best), best)

    def record(self, guesses: Sequence[Guess], contested: bool, hit: bool) -> None:
        if len(guesses) > 1 or contested:
            best = max(self._member_chance(guess) for guess in guesses)
            self._count(_combination(guesses, contested, best), hit)
        for guess in guesses:
            for level in (2, 3, 4):
                self._count(guess[:level], hit)
        self._num_judged += 1
        if self._num_judged % REFRESH_EVERY == 0 or self._num_judged < REFRESH_EVERY:
            self._chances.clear()

    def _member_chance(self, guess: Guess) -> float:
        chance = self._chances.get(guess)
        if chance is None:
            chance = (guess[2] + 0.5) / NUM_BUCKETS
            for level in (2, 3, 4):
                chance = self._posterior(guess[:level], chance)
            self._chances[guess] = chance
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


_NOTHING = [0.0, 0.0]


def _combination(guesses: Sequence[Guess], contested: bool, best: float) -> Hashable:
    voters = tuple(sorted((guess[0], min(guess[1], 1)) for guess in guesses))
    return voters, contested, int(best * (NUM_BUCKETS - 1))
