"""`ServedEngine` over `AsyncLLM`."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.core.step_record import Load, StepObserver, StepRecord
from paceline.llm import AsyncLLM

STATS_EVERY_S = 0.25  # while requests run; and once when none does any more


class OverAsyncLLM:
    def __init__(self, llm: AsyncLLM, methods: Sequence[str] = ()) -> None:
        self._llm = llm
        self.max_model_len = llm.max_model_len
        self.vocab_size = llm.vocab_size
        self.max_num_seqs = llm.max_num_seqs
        self.methods = tuple(methods)
        self.tokenizer = llm.get_tokenizer()
        self.default_sampling = llm.default_sampling
        self.cache_config = llm.cache_config
        self._take_stats()  # nothing runs yet

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]:
        prompt = {"prompt_token_ids": token_ids, "cache_salt": cache_salt or None}
        return self._llm.generate(prompt, params, request_id, output_kind=RequestOutputKind.DELTA)

    def method_of(self, params: SamplingParams) -> str:
        return self._llm.method_of(params)

    def load(self) -> Load:
        return self._llm.load()

    def speculation_stats(self) -> dict[str, Any]:
        return self._stats

    def cluster(self) -> None:
        return None

    def _take_stats(self) -> None:
        """In the engine's thread, which changes what is counted; others read the copy, as often as they like."""
        self._stats: dict[str, Any] = self._llm.stats()["speculation"]
        self._stats_s = time.monotonic()

    def watch(self, observer: StepObserver) -> None:
        def on_step(step: StepRecord) -> None:
            observer(step)
            if time.monotonic() - self._stats_s > STATS_EVERY_S or self._llm.load().num_running == 0:
                self._take_stats()

        self._llm.watch(on_step)

    def when_dead(self, callback: Callable[[Exception], None]) -> None:
        self._llm.on_death = callback
        if self._llm.death is not None:  # it died before this was called
            callback(self._llm.death)

    def shutdown(self) -> None:
        self._llm.shutdown()

    def check_integrity(self) -> None:
        self._llm.check_integrity()
