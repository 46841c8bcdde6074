"""The rows of drafts that are made level by level: which nodes are fed next, and which scratch slots they see."""

from paceline.models.drafters.paged import KeyRows
from paceline.spec.feature.draft_growth import Growth
from paceline.spec.feature.feature_drafter import RowBuilder


class Levels:
    """Where the trees of a group stand: the frontier's rows, and the scratch slots of the nodes above it."""

    def __init__(self, growing: list[Growth], builder: RowBuilder, first_slot: int) -> None:
        self.growing, self.builder = growing, builder
        self.owners = [(i, -1) for i in range(len(growing))]  # (request, node) of each row of the last step
        self.depth = 0
        self._slot_of: list[dict[int, int]] = [{} for _ in growing]  # per request: node -> its scratch slot
        self._next_slot = first_slot

    def descend(self) -> list[tuple[int, int, int]]:
        """The nodes to feed next: (request, node, row of its parent's feature in the last step)."""
        self.depth += 1
        row_of = {owner: row for row, owner in enumerate(self.owners)}
        for growth in self.growing:
            if self.depth >= growth.budget.max_depth:
                growth.frontier = []
        self.owners = [(i, node) for i, growth in enumerate(self.growing) for node in growth.frontier]
        for i, node in self.owners:
            self._slot_of[i][node] = self._next_slot
            self._next_slot += 1
        return [(i, node, row_of[i, self.growing[i].parents[node]]) for i, node in self.owners]

    def rows(self, fed: list[tuple[int, int, int]]) -> KeyRows:
        return self.builder.rows(
            [i for i, _, _ in fed],
            [self.growing[i].request.num_tokens - 2 + self.depth for i, _, _ in fed],
            [self._slot_of[i][node] for i, node, _ in fed],
            [self._path(i, node) for i, node, _ in fed],
        )

    def _path(self, i: int, node: int) -> list[int]:
        """Scratch slots from the top node down to `node`."""
        path = []
        while node >= 0:
            path.append(self._slot_of[i][node])
            node = self.growing[i].parents[node]
        return path[::-1]
