"""The chance that a drafted path is accepted as a whole, by how likely its drafter says it is: counted, one table per
drafter. The twin of lab/live_pass_cost.py and lab/live_call_cost.py.

Every path of a draft is an outcome, verified or not, because the tokens that the target emitted show which paths were
right. Outcomes are counted by what the drafter said. Where few were seen its own word counts, times how often it was
right so far; then those of its neighbours, and then its own. A likelier path is never given a smaller chance.
"""

from collections.abc import Sequence
from itertools import accumulate

BUCKETS = 32  # of what a drafter says; certain paths have one of their own
OUTCOMES = 5  # that a drafter's own word counts for. Half: trusts a few outcomes; twice: believes it for longer
MEMORY = 1024  # outcomes after which all counts are halved. Half: jitters; twice: lags
PASSAGE = 48  # outcomes after which half is forgotten of what the last ones show. Half: jitters; twice: lags
RESTORED = 64.0  # outcomes that those of another run count for, at most
HALF_LIFE = 256  # steps without a draft after which the counts are halved


class Acceptance:
    def __init__(self) -> None:
        self._hits = [0.0] * (BUCKETS + 1)
        self._tries = [0.0] * (BUCKETS + 1)
        self._said = [((bucket + 0.5) / BUCKETS) ** 2 for bucket in range(BUCKETS)] + [1.0]
        self._num_new = 0
        self._recent = [0.0, 0.0]  # outcomes of the last passage: right ones, and those expected by the table
        self._trust = 1.0  # the former over the latter, as far as it is in `chances`
        self._table = list(self._said)  # by bucket, over all texts
        self.num_known = 0.0  # outcomes that the table comes from
        self.chances = list(self._said)  # by bucket, in this passage of text

    def learn(
        self, token_ids: Sequence[int], parents: Sequence[int], buckets: Sequence[int], new_token_ids: Sequence[int]
    ) -> None:
        """From a tree that was drafted, what was said of its paths, and the tokens that the target emitted."""
        hits, tries, table, num_new = self._hits, self._tries, self._table, len(new_token_ids)
        num_hits, expected, before = 0, 0.0, self._num_new
        right: list[int] = []  # by node: its depth, or -1 where its path is wrong
        for token, parent, bucket in zip(token_ids, parents, buckets, strict=True):
            depth = 0 if parent < 0 else right[parent]
            if depth < 0:
                right.append(-1)
            elif depth >= num_new:  # nobody knows
                right.append(depth + 1)
                continue
            else:
                hit = token == new_token_ids[depth]
                right.append(depth + 1 if hit else -1)
                hits[bucket] += hit
                num_hits += hit
            tries[bucket] += 1.0
            expected += table[bucket]
            self._num_new += 1
        kept = 0.5 ** ((self._num_new - before) / PASSAGE)
        right_ones, expected = kept * self._recent[0] + num_hits, kept * self._recent[1] + expected
        self._recent = [right_ones, expected]
        trust = (right_ones + OUTCOMES) / (expected + OUTCOMES)
        if not 0.95 < trust / self._trust < 1.05:  # computing the chances takes time
            self._trust = trust
            self.chances = [trust * one if trust * one < 0.99 else max(0.99, one) for one in table]
        if self._num_new >= OUTCOMES and self._num_new >= sum(tries) / 16:
            self.refresh()

    def age(self, num_steps: int) -> None:
        """So many steps have passed in which nothing was drafted."""
        kept = 0.5 ** (num_steps / HALF_LIFE)
        self._hits, self._tries = [kept * one for one in self._hits], [kept * one for one in self._tries]

    def refresh(self) -> None:
        """The table, from the counts."""
        self._num_new = 0
        hits, tries, said = self._hits, self._tries, self._said
        if sum(tries) > MEMORY:
            hits[:], tries[:] = [one / 2 for one in hits], [one / 2 for one in tries]
        self.num_known = sum(tries)
        expected = sum([one * count for one, count in zip(said, tries, strict=True)])
        share = (sum(hits) + OUTCOMES) / (expected + OUTCOMES)
        found = []
        for bucket in range(BUCKETS + 1):
            near = slice(max(0, bucket - 1), bucket + 2 if bucket < BUCKETS - 1 else bucket + 1)
            prior = min(said[bucket], share * said[bucket]) if bucket == BUCKETS else min(0.99, share * said[bucket])
            chance = (sum(hits[near]) + OUTCOMES * prior) / (sum(tries[near]) + OUTCOMES)
            found.append((hits[bucket] + OUTCOMES * chance) / (tries[bucket] + OUTCOMES))
        above = accumulate(found, max)
        below = list(accumulate(reversed(found), min))[::-1]
        self._trust = 1.0
        self._table = self.chances = [(a + b) / 2 for a, b in zip(above, below, strict=True)]

    def least_said(self, chance: float) -> float:
        """What the drafter says of paths that have this chance."""
        for bucket, one in enumerate(self.chances):
            if one > chance:
                return (bucket / BUCKETS) ** 2
        return 1.0

    def state(self) -> list[float]:
        """To be kept, and given to `restore` of another one."""
        return [*self._hits, *self._tries]

    def restore(self, state: Sequence[float]) -> None:
        """What another run saw is soon outweighed."""
        total = sum(state[BUCKETS + 1 :])
        weight = min(1.0, RESTORED / total) if total > 0.0 else 0.0
        known = [weight * max(0.0, one) for one in state]
        self._hits, self._tries = known[: BUCKETS + 1], known[BUCKETS + 1 :]
        self._hits = [min(hit, count) for hit, count in zip(self._hits, self._tries, strict=True)]
        self.refresh()
