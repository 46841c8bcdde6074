"""What became of drafts: one type for a pass, a request, a method, a run, and each member of a merged tree.

Every pass is counted once, when its tokens join the request; totals add that pass's counts.

>>> counts = DraftCounts()
>>> counts.count(DraftTree.chain([5, 6, 7]).by("ngram"), accepted=[0, 1], num_tokens=3)
>>> counts.num_draft_tokens, counts.num_accepted_tokens, counts.by_member["ngram"].num_wasted_tokens
(3, 2, 1)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from paceline.core.tree import DraftTree


@dataclass(slots=True)
class DraftCounts:
    """A *draft* is one tree that was verified. A node that several members drafted counts for each of them. Of a member
    there are drafts (trees with a node of its own) and nodes, but no steps: the pass and its own token belong to none.
    """

    num_draft_tokens: int = 0  # draft nodes verified
    num_accepted_tokens: int = 0  # of these, nodes whose tokens joined the output
    accepted_per_position: list[int] = field(default_factory=list)  # [d]: accepted nodes at depth d + 1
    num_drafts: int = 0
    num_steps: int = 0  # target passes that verified for a request, with or without a draft; 0: not known
    num_emitted_tokens: int = 0  # by these passes, the bonus token counted
    by_member: dict[str, "DraftCounts"] = field(default_factory=dict)  # of a method alone: the method itself

    @staticmethod
    def total(parts: Iterable["DraftCounts"]) -> "DraftCounts":
        total = DraftCounts()
        for part in parts:
            total.add(part)
        return total

    @staticmethod
    def of_pass(tree: DraftTree, accepted: Sequence[int], num_tokens: int) -> "DraftCounts":
        """Of one pass. What it gives may be shared: add it to others, and do not add to it."""
        if not tree.token_ids and num_tokens == 1:
            return PLAIN_PASS
        members = tree.members
        if members and members.count(members[0]) == len(members):  # all by the same: few such passes differ
            num_accepted = min(len(accepted), num_tokens)
            return _pass_by(members[0], len(members), num_accepted, num_tokens)
        counts = DraftCounts()
        counts.count(tree, accepted, num_tokens)
        return counts

    @staticmethod
    def from_dict(figures: Mapping[str, Any]) -> "DraftCounts":
        """Out of `LLM.stats()["speculation"][method]`, or out of a part of it."""
        return DraftCounts(
            figures.get("num_draft_tokens", 0),
            figures.get("num_accepted_tokens", 0),
            list(figures.get("accepted_per_position", ())),
            figures.get("num_drafts", 0),
            figures.get("num_steps", 0),
            figures.get("num_emitted_tokens", 0),
            {name: DraftCounts.from_dict(member) for name, member in figures.get("by_member", {}).items()},
        )

    @property
    def num_wasted_tokens(self) -> int:
        """Draft nodes that were verified and not accepted."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target pass, the bonus token counted; 1.0 is plain decoding."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0

    def count(self, tree: DraftTree, accepted: Sequence[int], num_tokens: int) -> None:
        """Add one pass that verified `tree` and emitted `num_tokens`."""
        self.num_steps += 1
        self.num_emitted_tokens += num_tokens
        if not tree.token_ids:
            return
        accepted = accepted[:num_tokens]  # where a stop cut the output short, nodes past it do not count
        self._count_nodes(len(tree.token_ids), range(len(accepted)))
        if tree.members is None:
            return
        num_nodes: dict[str, int] = {}
        for names, count in Counter(tree.members).items():  # few of them differ, so the cost per node is small
            for name in names:
                num_nodes[name] = num_nodes.get(name, 0) + count
        for name, count in num_nodes.items():
            positions = [position for position, node in enumerate(accepted) if name in tree.members[node]]
            self._member(name)._count_nodes(count, positions)

    def add(self, other: "DraftCounts", times: int = 1) -> None:
        """`times`: how often; -1 takes it away."""
        self.num_steps += times * other.num_steps
        self.num_emitted_tokens += times * other.num_emitted_tokens
        if not other.num_drafts:  # then all that follows is zero
            return
        self.num_draft_tokens += times * other.num_draft_tokens
        self.num_accepted_tokens += times * other.num_accepted_tokens
        self.num_drafts += times * other.num_drafts
        if other.accepted_per_position:
            per_position = self._per_position(len(other.accepted_per_position))
            for position, count in enumerate(other.accepted_per_position):
                per_position[position] += times * count
        for name, counts in other.by_member.items():
            self._member(name).add(counts, times)

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        """What came between two readings of totals, of which this is the later one."""
        between = DraftCounts.total([self])
        between.add(earlier, times=-1)
        return between

    def to_dict(self) -> dict[str, Any]:
        """What is said of a method and of a member alike, ready for JSON."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_wasted_tokens": self.num_wasted_tokens,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "accepted_per_position": list(self.accepted_per_position),
        }

    def members_dict(self) -> dict[str, dict[str, Any]]:
        # A list, for the engine's thread may add a member while a server's reads.
        return {name: counts.to_dict() for name, counts in list(self.by_member.items())}

    def _count_nodes(self, num_nodes: int, positions: Sequence[int]) -> None:
        """A draft of so many nodes, of which those at `positions` (0: depth 1; ascending) were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_nodes
        self.num_accepted_tokens += len(positions)
        if positions:
            per_position = self._per_position(positions[-1] + 1)
            for position in positions:
                per_position[position] += 1

    def _per_position(self, length: int) -> list[int]:
        """`accepted_per_position`, at least so long."""
        self.accepted_per_position.extend([0] * (length - len(self.accepted_per_position)))
        return self.accepted_per_position

    def _member(self, name: str) -> "DraftCounts":
        counts = self.by_member.get(name)
        if counts is None:
            counts = self.by_member[name] = DraftCounts()
        return counts


@lru_cache(maxsize=4096)
def _pass_by(names: tuple[str, ...], num_nodes: int, num_accepted: int, num_tokens: int) -> DraftCounts:
    """Of a pass over a tree whose nodes all have the same drafters."""
    counts = DraftCounts()
    tree = DraftTree([0] * num_nodes, [-1] * num_nodes, members=[names] * num_nodes)
    counts.count(tree, range(num_accepted), num_tokens)
    return counts


NO_PASS = DraftCounts()
PLAIN_PASS = DraftCounts(num_steps=1, num_emitted_tokens=1)  # one token without a draft
