"""What a worker asks of its engine. `engine_seam.py` asks it of `AsyncLLM`; tests have an engine that costs nothing."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from paceline.cluster.events import Event
from paceline.cluster.fetch import BlockHolder, BlockTaker, Key
from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams


class WorkerEngine(BlockHolder[Any], BlockTaker[Any, Any], Protocol):  # Any: its own leases, tickets and keys
    def info(self) -> dict[str, Any]: ...

    # JSON: what the server wants to know (max_model_len, vocab_size, ...), "block_size", "fingerprint" (name -> text)

    def generate(
        self, prompt: Mapping[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]: ...  # deltas; the prompt may have cache_salt and output_token_ids

    def keys(self, token_ids: Sequence[int], cache_salt: str) -> Sequence[Key]: ...

    # of the blocks of a prompt that can come from elsewhere

    def listen(self, listener: Callable[[Sequence[Event]], None]) -> None: ...  # called in the worker's event loop

    def figures(self) -> dict[str, Any]: ...  # num_running, num_waiting, kv_usage, speculation: JSON

    def shutdown(self) -> None: ...
