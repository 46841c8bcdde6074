"""One HTTP call on its way through the server."""

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import RequestMetrics, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.serve.http.request_bodies import CompletionRequest, GenerationRequest
from paceline.serve.tools.plan import ToolPlan


@dataclass(slots=True)
class Call:
    """Prompts x n choices under one id."""

    id: str
    model: str
    body: GenerationRequest
    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str = ""
    plan: ToolPlan | None = None  # where tools may be called
    created: int = field(default_factory=lambda: int(time.time()))
    arrival_s: float = field(default_factory=time.perf_counter)
    counts: list[DraftCounts] = field(default_factory=list)  # so far, one per choice, where a prediction was given
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # by prompt, where asked for
    metrics: dict[int, RequestMetrics] = field(default_factory=dict)  # by prompt, once it is finished

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def echoes(self) -> bool:
        return isinstance(self.body, CompletionRequest) and bool(self.body.echo)

    def num_entries(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """How many tokens and log-probabilities are written for so many tokens: what it takes to write them down."""
        params = self.params
        entries = num_tokens * (1 + (params.logprobs or 0))
        if self.echoes or params.prompt_logprobs is not None:
            entries += num_prompt_tokens * (1 + (params.prompt_logprobs or 0))
        return entries

    def log_fields(self) -> dict[str, Any]:
        """For the access log: sizes and figures, never text."""
        parts = self.metrics.values()
        return {
            "call": self.id,
            "num_choices": self.num_choices,
            "num_prompt_tokens": sum(len(prompt) for prompt in self.prompts),
            "num_output_tokens": sum(m.num_output_tokens for m in parts),
            "num_steps": sum(m.num_steps for m in parts),
            "ttft_s": min((m.ttft_s for m in parts if m.ttft_s is not None), default=None),
            "stream": bool(self.body.stream),
            "speculative": (self.body.speculative or {}).get("method"),
            "prediction": self.body.prediction is not None,
        }

    def sequence_ids(self, prompt: int) -> list[str]:
        """The engine's names for the samples of one prompt."""
        base = self.request_id(prompt)
        return [base] if self.params.n == 1 else [f"{base}-{i}" for i in range(self.params.n)]

    def request_id(self, prompt: int) -> str:
        return self.id if len(self.prompts) == 1 else f"{self.id}.{prompt}"
