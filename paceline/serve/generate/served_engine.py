"""The seam between the server and the engine: what the server asks for. `over_async_llm.py` asks it of `AsyncLLM`.

The server never looks inside the engine. It sends prompts, reads deltas, and is told after every pass what became of
the drafts (`StepRecord`): the page's tree, a prediction's counts and the time model all come from that one report.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.core.step_record import Load, StepObserver
from paceline.core.tokenizer import Tokenizer


class ServedEngine(Protocol):
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

    @property
    def default_sampling(self) -> Mapping[str, Any]: ...  # options that hold where a request says nothing

    @property
    def cache_config(self) -> Mapping[str, str]: ...  # how its KV cache is set up, for the metrics

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]: ...  # what is new since it was last asked; the last one is finished

    def method_of(self, params: SamplingParams) -> str: ...  # the drafting method of a request with these options

    def load(self) -> Load: ...

    def speculation_stats(self) -> dict[str, Any]: ...  # method -> counts, as spec/statistics.py gives them

    def cluster(self) -> dict[str, Any] | None: ...  # workers and where requests went, for the page; None: one engine

    def watch(self, observer: StepObserver) -> None: ...

    def when_dead(self, callback: Callable[[Exception], None]) -> None: ...  # called in the engine's thread, once

    def shutdown(self) -> None: ...

    def check_integrity(self) -> None: ...  # only after shutdown: asserts that no KV block was lost
