"""What comes out: of the verifier, and of the engine for the caller."""

import enum
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.core.draft_counts import DraftCounts
from paceline.core.logprobs import Logprob
from paceline.core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token beside the likeliest ones, under the model's own distribution."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest token
    top: dict[int, float] = field(default_factory=dict)  # token id -> logprob, likeliest first

    def as_dict(self, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
        """By token id: this token first, then the likeliest ones."""
        found = {self.token_id: (self.logprob, self.rank)}
        for rank, (token_id, logprob) in enumerate(self.top.items(), start=1):
            found.setdefault(token_id, (logprob, rank))
        return {
            token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))
            for token_id, (logprob, rank) in found.items()
        }


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
    arrival_s: float = 0.0  # by time.perf_counter
    num_preemptions: int = 0

    # vLLM's names. Moments are on the clock of time.perf_counter, `arrival_time` on the wall's.
    is_corrupted: ClassVar[bool] = False  # logits that are not finite end a request with an error

    @property
    def arrival_time(self) -> float:
        return time.time() - time.perf_counter() + self.arrival_s

    @property
    def queued_ts(self) -> float:
        return self.arrival_s

    @property
    def scheduled_ts(self) -> float:
        return self.arrival_s + (self.queue_s or 0.0)

    @property
    def first_token_ts(self) -> float:
        return self.arrival_s + (self.ttft_s or 0.0)

    @property
    def last_token_ts(self) -> float:
        return self.arrival_s + (self.e2e_s or 0.0)

    @property
    def first_token_latency(self) -> float:
        return self.ttft_s or 0.0

    @property
    def num_generation_tokens(self) -> int:
        return self.num_output_tokens

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
    token_logprobs: list[TokenLogprobs] | None = None  # one per token, where asked for; `logprobs` is made of it
    token_sources: list[str] = field(default_factory=list)
    """Who each token came from: a drafter's name (accepted draft), "recovered", "bonus", or "target" (no draft)."""
    cumulative_logprob: float | None = None  # of all new tokens so far, where log-probabilities were asked for
    offset: int = 0
    """Output tokens that stand before `token_ids`: in the deltas before this one, or given to a resumed request."""
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    _logprobs: list[dict[int, Logprob]] | None = field(default=None, init=False, repr=False, compare=False)

    lora_request: ClassVar[None] = None  # vLLM's; there are no adapters

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """As vLLM gives them: by token id, with rank and text; made when first read."""
        if self._logprobs is None and self.token_logprobs is not None:
            self._logprobs = [entry.as_dict(self.tokenizer) for entry in self.token_logprobs]
        return self._logprobs

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or what is new of it (`RequestOutputKind`).

    Lists of a delta hold what is new, and `outputs` only the samples that have something new."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None  # once it is finished
    prompt_token_logprobs: list[TokenLogprobs | None] | None = None  # `prompt_logprobs` is made of it
    error: Exception | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None until that is known
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    _prompt_logprobs: list[dict[int, Logprob] | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    # vLLM's; there are no adapters, encoders or other engines that KV goes to
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As vLLM gives them, one per prompt token; the first has none."""
        if self._prompt_logprobs is None and self.prompt_token_logprobs is not None:
            self._prompt_logprobs = [
                None if entry is None else entry.as_dict(self.tokenizer) for entry in self.prompt_token_logprobs
            ]
        return self._prompt_logprobs
