"""The seam between a load and whatever answers it.

A backend answers one request at a time (many at once, as tasks) and says what the client saw: when the first piece
came, when each further piece came, how many tokens there were by id or by the server's own count. A failed request
carries its error and is never timed.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.bench.workloads.workload import Prompt
from paceline.core.draft_counts import DraftCounts


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every request of a run is sampled. Request i uses seed + i, so that all settings produce the same text."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True  # every answer has max_tokens, so that all settings do the same work


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; times are seconds on the run's clock."""

    prompt_id: str
    category: str
    begin_s: float
    event_s: list[float] = field(default_factory=list)  # when each piece of text came
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    output_hash: str = ""  # of the token ids, or of the text where a server gives no ids
    counts: DraftCounts | None = None  # None: only the server as a whole knows
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.begin_s

    @property
    def e2e_s(self) -> float:
        return self.event_s[-1] - self.begin_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first piece."""
        if self.num_output_tokens < 2 or len(self.event_s) < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_output_tokens - 1)


class Backend(Protocol):
    async def generate(self, prompt: Prompt, sampling: Sampling, index: int) -> Answer: ...

    def counts(self) -> DraftCounts | None:
        """Totals since the start of the backend, where it has them."""
        ...

    def figures(self) -> dict[str, float]:
        """Totals since the start of the backend: passes, and seconds by phase; empty where a server does not say."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the record's provenance."""
        ...

    def close(self) -> None: ...
