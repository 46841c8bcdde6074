"""What drafting cost and what it brought, for each method and for each member of a merged tree.

A *draft* is one tree that was verified. A node that several members drafted counts for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_counts import DraftCounts, count_members
from paceline.core.request import Request
from paceline.spec.proposer import RequestPass


@dataclass(slots=True)
class MethodStats(DraftCounts):
    num_steps: int = 0  # target passes of requests that this method drafts for, with or without a draft
    num_emitted_tokens: int = 0  # by these passes, the bonus token counted
    num_drafts: int = 0
    num_proposals: int = 0  # times the method was asked, one per request and step
    draft_s: float = 0.0  # host time spent drafting and observing
    by_member: dict[str, DraftCounts] = field(default_factory=dict)  # of a method alone: the method itself

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target pass, the bonus token counted; 1.0 is plain decoding."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0

    def spend(self, seconds: float, requests: Sequence[Request]) -> None:
        """Host time of a step; what is done for a batch is shared evenly among its requests."""
        self.draft_s += seconds
        for request in requests:
            request.draft_s += seconds / len(requests)

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
        count_members(self.by_member, tree, accepted)

    def to_dict(self) -> dict[str, Any]:
        return DraftCounts.to_dict(self) | {
            "num_steps": self.num_steps,
            "num_emitted_tokens": self.num_emitted_tokens,
            "num_drafts": self.num_drafts,
            "num_proposals": self.num_proposals,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_s": self.draft_s,
            # A list, for the engine's thread may add a member while a server's reads.
            "by_member": {name: counts.to_dict() for name, counts in list(self.by_member.items())},
        }
