"""What comes out: of the verifier, and of the engine for the caller."""

import enum
from dataclasses import dataclass, field

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
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_steps: int  # target passes that emitted tokens for this request
    num_drafts: int  # of these, passes that verified a draft
    num_draft_tokens: int  # draft nodes verified
    num_accepted_tokens: int
    accepted_per_position: list[int]  # how often the node at depth 1, 2, ... was accepted
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None  # mean time per output token after the first
    e2e_s: float | None
    lossy: bool = False  # verified by a rule that changes the distribution (only by explicit choice)
    by_member: dict[str, DraftCounts] = field(default_factory=dict)  # who drafted: the method, or a merge's members
    draft_s: float = 0.0  # host time spent drafting, its share of what was drafted for a whole batch

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target pass, the bonus token counted; 1.0 is plain decoding."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def num_wasted_tokens(self) -> int:
        """Draft nodes verified in vain."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


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
