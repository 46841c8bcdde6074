"""What an engine tells its observers: how full it is, and what each step did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.draft_counts import DraftCounts
from paceline.core.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Load:
    """How full the engine is right now."""

    num_running: int
    num_waiting: int
    kv_usage: float  # 0..1


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one target pass did for one request."""

    request_id: str
    method: str
    num_rows: int
    num_prompt_rows: int  # rows of a prompt chunk; 0 for a decode step
    draft: DraftTree
    accepted: Sequence[int]  # node indices, top first
    new_token_ids: Sequence[int]
    cache_salt: str = ""  # of the request: says which tenant it belongs to (serve/http/tenants.py)
    counts: DraftCounts = field(default_factory=DraftCounts)  # of this pass


@dataclass(frozen=True, slots=True)
class StepRecord:
    passes: Sequence[PassRecord]
    seconds: float  # since the step before, idle time left out


StepObserver = Callable[[StepRecord], None]  # called in the engine's thread: must be quick and must not raise
