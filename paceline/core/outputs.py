"""What comes out: of the verifier, and of the engine for the caller."""

import enum
from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_counts import DraftCounts


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token beside the likeliest ones, under the model's own distribution."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest token
    top: dict[int, float] = field(default_factory=dict)  # token id -> logprob, likeliest first


@dataclass(slots=True)
class VerifyResult:
    """What one request's pass decided: `token_ids` are the accepted nodes' tokens and one more."""

    token_ids: list[int]
    accepted: list[int]  # node indices of the accepted path, top node first
    logprobs: list[TokenLogprobs] | None = None  # one per token
    error: Exception | None = None  # this request cannot go on; the others can


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Figures of one request, or of all samples of a call. What `counts` says can be read here by the same names."""

    num_prompt_tokens: int
    num_cached_tokens: int
    counts: DraftCounts
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None  # mean time per output token after the first
    e2e_s: float | None
    lossy: bool = False  # verified by a rule that changes the distribution (only by explicit choice)
    draft_s: float = 0.0  # host time spent drafting, its share of what was drafted for a whole batch

    @property
    def num_output_tokens(self) -> int:
        return self.counts.num_emitted_tokens

    @property
    def num_steps(self) -> int:
        """Target passes that emitted tokens for this request."""
        return self.counts.num_steps

    @property
    def num_drafts(self) -> int:
        """Of these, passes that verified a draft."""
        return self.counts.num_drafts

    @property
    def num_draft_tokens(self) -> int:
        return self.counts.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        return self.counts.num_accepted_tokens

    @property
    def num_wasted_tokens(self) -> int:
        return self.counts.num_wasted_tokens

    @property
    def accepted_per_position(self) -> list[int]:
        """How often the node at depth 1, 2, ... was accepted."""
        return self.counts.accepted_per_position

    @property
    def by_member(self) -> dict[str, DraftCounts]:
        """The drafters: the method, or a merge's members."""
        return self.counts.by_member

    @property
    def mean_acceptance_length(self) -> float:
        return self.counts.mean_acceptance_length

    @property
    def draft_acceptance_rate(self) -> float:
        return self.counts.draft_acceptance_rate

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, the derived figures included."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_steps": self.num_steps,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": list(self.accepted_per_position),
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "lossy": self.lossy,
            "by_member": self.counts.members_dict(),
            "draft_s": self.draft_s,
            "num_wasted_tokens": self.num_wasted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds, by vLLM's names."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the output before: its cost does not grow with the answer
    FINAL_ONLY = "final_only"  # everything, once, at the end


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    token_sources: list[str] = field(default_factory=list)
    """Who each token came from: a drafter's name (accepted draft), "recovered", "bonus", or "target" (no draft)."""


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or what is new of it (`RequestOutputKind`).

    Lists of a delta hold what is new, and `outputs` only the samples that have something new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None
