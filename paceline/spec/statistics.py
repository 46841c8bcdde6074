"""What drafting cost and what it brought, for each method and for each member of a merged tree."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.core.request import Request


@dataclass(slots=True)
class MethodStats:
    counts: DraftCounts = field(default_factory=DraftCounts)  # of all passes of requests that this method drafts for
    num_proposals: int = 0  # times the method was asked, one per request and step
    draft_s: float = 0.0  # host time spent drafting and observing

    def spend(self, seconds: float, requests: Sequence[Request]) -> None:
        """Host time of a step; what is done for a batch is shared evenly among its requests."""
        self.draft_s += seconds
        for request in requests:
            request.draft_s += seconds / len(requests)

    def to_dict(self) -> dict[str, Any]:
        counts = self.counts
        return counts.to_dict() | {
            "num_steps": counts.num_steps,
            "num_emitted_tokens": counts.num_emitted_tokens,
            "num_drafts": counts.num_drafts,
            "num_proposals": self.num_proposals,
            "mean_acceptance_length": counts.mean_acceptance_length,
            "draft_s": self.draft_s,
            "by_member": counts.members_dict(),
        }
