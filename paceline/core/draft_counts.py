"""How many draft nodes were verified and accepted: of a method, of a member of a merged tree, or for one request.

`accepted_per_position[d]` counts the accepted nodes at depth d + 1, so the acceptance rate by position is that over the
number of drafts. A node that several members drafted counts for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.tree import DraftTree

MEMBER_SEPARATOR = "+"  # DraftTree.members: "ngram+suffix" drafted the node together


@dataclass(slots=True)
class DraftCounts:
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def num_wasted_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def accept(self, position: int) -> None:
        self.num_accepted_tokens += 1
        while len(self.accepted_per_position) <= position:
            self.accepted_per_position.append(0)
        self.accepted_per_position[position] += 1

    def add(self, other: "DraftCounts") -> None:
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        longer = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * longer)
        for position, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += count

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_wasted_tokens": self.num_wasted_tokens,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "accepted_per_position": list(self.accepted_per_position),
        }


def count_members(by_member: dict[str, DraftCounts], tree: DraftTree, accepted: Sequence[int]) -> None:
    """Add one verified tree to the counts of everybody who drafted nodes of it."""
    if tree.members is None:
        return
    for names in tree.members:
        for name in names.split(MEMBER_SEPARATOR):
            by_member.setdefault(name, DraftCounts()).num_draft_tokens += 1
    for position, node in enumerate(accepted):
        for name in tree.members[node].split(MEMBER_SEPARATOR):
            by_member[name].accept(position)


def merged_counts(parts: Sequence[dict[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """Counts by member of several requests, added up."""
    total: dict[str, DraftCounts] = {}
    for part in parts:
        for name, counts in part.items():
            total.setdefault(name, DraftCounts()).add(counts)
    return total
