"""How many levels a model drafts: it begins with one, and gets another as long as that is worth its time.

A drafting model runs once for every level. The rule is that of nodes: level d is worth it iff the chance that a path of
d tokens is accepted is above what the level's time, and its row's, is worth in tokens. What a level that was never
drafted would bring is guessed from the ones above it: each token as likely as they were on average.
"""

from dataclasses import dataclass

LEVEL_STEPS = 4  # judged before the number changes: half reacts to chance, twice takes as many steps longer to begin
NEWEST = 0.15  # weight of the newest step in averages: as of the value of a request's drafts


@dataclass(slots=True)
class Levels:
    most: int
    count: int = 1
    _chance: float = 0.0  # of a whole path, with `count` levels
    _level_s: float = 0.0  # of one level, for all requests
    _num_judged: int = 0  # steps with `count` levels

    def learn(self, chance: float, cost_s: float, rows_s: float, token_s: float) -> None:
        """A judged step: the chance of its whole paths, its time, that of one row for each request, and what as many
        tokens as there are requests cost without it."""
        self._num_judged += 1
        weight = max(NEWEST, 1.0 / self._num_judged)
        self._chance += weight * (chance - self._chance)
        self._level_s += max(NEWEST, weight if self.count == 1 else 0.0) * (cost_s / self.count - self._level_s)
        if self._num_judged < LEVEL_STEPS or self._chance <= 0.0:
            return
        price = (self._level_s + rows_s) / token_s
        if self.count < self.most and self._chance ** (1.0 + 1.0 / self.count) > price:
            self._begin(self.count + 1)
        elif self.count > 1 and self._chance < price:
            self._begin(self.count - 1)

    def _begin(self, count: int) -> None:
        self.count, self._num_judged, self._chance = count, 0, 0.0
