"""What drafting cost and what it brought, for each method and for each member of a merged tree.

A *draft* is one tree that was verified. `accepted_per_position[d]` counts the accepted nodes at depth d + 1, so the
acceptance rate by position is that over `num_drafts`. A node that several members drafted counts for each of them.
"""

from dataclasses import dataclass, field
from typing import Any

from paceline.spec.proposer import RequestPass

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

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_wasted_tokens": self.num_wasted_tokens,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "accepted_per_position": list(self.accepted_per_position),
        }


@dataclass(slots=True)
class MethodStats(DraftCounts):
    num_steps: int = 0  # target passes of requests that this method drafts for, with or without a draft
    num_emitted_tokens: int = 0  # by these passes, the bonus token counted
    num_drafts: int = 0
    num_proposals: int = 0  # times the method was asked, one per request and step
    draft_s: float = 0.0  # host time spent drafting and observing
    by_member: dict[str, DraftCounts] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target pass, the bonus token counted; 1.0 is plain decoding."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0

    def record(self, verified: RequestPass) -> None:
        self.num_steps += 1
        self.num_emitted_tokens += len(verified.new_token_ids)
        tree = verified.draft
        if not tree:
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(tree)
        # Where a stop cut the output short, nodes past it brought nothing.
        accepted = verified.accepted[: len(verified.new_token_ids)]
        for position in range(len(accepted)):
            self.accept(position)
        if tree.members is not None:
            self._record_members(tree.members, accepted)

    def _record_members(self, members: list[str], accepted: list[int]) -> None:
        for names in members:
            for name in names.split(MEMBER_SEPARATOR):
                self.by_member.setdefault(name, DraftCounts()).num_draft_tokens += 1
        for position, node in enumerate(accepted):
            for name in members[node].split(MEMBER_SEPARATOR):
                self.by_member[name].accept(position)

    def to_dict(self) -> dict[str, Any]:
        return DraftCounts.to_dict(self) | {
            "num_steps": self.num_steps,
            "num_emitted_tokens": self.num_emitted_tokens,
            "num_drafts": self.num_drafts,
            "num_proposals": self.num_proposals,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_s": self.draft_s,
            "by_member": {name: counts.to_dict() for name, counts in self.by_member.items()},
        }
