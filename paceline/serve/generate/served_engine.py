"""The seam between the server and the engine: what the server asks for. `engine_backend.py` asks it of `AsyncLLM`.

The server never looks inside the engine. It sends prompts, reads states, and is told after every pass what became of
the drafts (`StepRecord`): the page's tree, a prediction's counts and the time model all come from that one report.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.core.tokenizer import Tokenizer
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
    cache_salt: str = ""  # of the request: says whose it is (serve/http/tenants.py)


@dataclass(frozen=True, slots=True)
class StepRecord:
    passes: Sequence[PassRecord]
    seconds: float  # since the step before, idle time left out


StepObserver = Callable[[StepRecord], None]  # called in the engine's thread: must be quick and must not raise


class Backend(Protocol):
    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def methods(self) -> Sequence[str]: ...  # drafting methods that a request may choose

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]: ...

    def method_of(self, params: SamplingParams) -> str: ...  # who drafts for a request with these options

    def load(self) -> Load: ...

    def speculation_stats(self) -> dict[str, Any]: ...  # method -> counts, as spec/statistics.py gives them

    def watch(self, observer: StepObserver) -> None: ...

    def when_dead(self, callback: Callable[[Exception], None]) -> None: ...  # called in the engine's thread, once

    def shutdown(self) -> None: ...

    def check_integrity(self) -> None: ...  # only after shutdown: asserts that no KV block was lost
