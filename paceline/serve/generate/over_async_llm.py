"""`Backend` over `AsyncLLM`: the engine's own objects become the few records that the server knows."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.core.outputs import RequestOutput
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.llm import AsyncLLM
from paceline.serve.generate.served_engine import Load, PassRecord, StepObserver, StepRecord
from paceline.spec.config.request_choice import choose
from paceline.spec.proposer import RequestPass, StepContext

STATS_EVERY_S = 0.25  # while requests run; and once when none does any more


class EngineBackend:
    def __init__(self, llm: AsyncLLM, methods: Sequence[str] = ()) -> None:
        self._llm = llm
        engine = llm.engine
        self._core = engine.core
        self._known_s = 0.0  # of the step clock, at the last report
        self.max_model_len = engine.config.max_model_len
        self.vocab_size = engine.model.config.vocab_size
        self.max_num_seqs = engine.config.max_num_seqs
        self.methods = tuple(methods)
        self._methods: dict[str, str] = {}  # request id -> who drafts for it
        self.tokenizer = llm.get_tokenizer()
        self._take_stats()  # nothing runs yet

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]:
        prompt = {"prompt_token_ids": token_ids, "cache_salt": cache_salt or None}
        return self._llm.generate(prompt, params, request_id)

    def method_of(self, params: SamplingParams) -> str:
        return choose(self._core.speculator.config, params.speculative).method

    def load(self) -> Load:
        scheduler = self._core.scheduler
        return Load(len(scheduler.running), len(scheduler.waiting), self._core.kv.usage)

    def speculation_stats(self) -> dict[str, Any]:
        return self._stats

    def _take_stats(self) -> None:
        """In the engine's thread, which changes what is counted; others read the copy, as often as they like."""
        self._stats = self._core.speculator.stats()
        self._stats_s = time.monotonic()

    def watch(self, observer: StepObserver) -> None:
        def on_step(step: StepContext) -> None:
            total_s = sum(self._core.clock.seconds.values())
            seconds, self._known_s = total_s - self._known_s, total_s
            observer(StepRecord([self._record(part) for part in step.passes], seconds))
            for request in step.gone:
                self._methods.pop(request.request_id, None)
            if not step.requests or time.monotonic() - self._stats_s > STATS_EVERY_S:
                self._take_stats()

        self._core.observers.append(on_step)

    def _record(self, part: RequestPass) -> PassRecord:
        return PassRecord(
            request_id=part.request.request_id,
            method=self._method(part.request),
            num_rows=len(part.rows),
            num_prompt_rows=part.num_committed if part.num_committed > 1 else 0,
            draft=part.draft,
            accepted=part.accepted,
            new_token_ids=part.new_token_ids,
            cache_salt=part.request.cache_salt,
            counts=part.counts,
        )

    def _method(self, request: Request) -> str:
        method = self._methods.get(request.request_id)
        if method is None:
            method = self._methods[request.request_id] = self.method_of(request.sampling_params)
        return method

    def when_dead(self, callback: Callable[[Exception], None]) -> None:
        self._llm.on_death = callback
        if self._llm.death is not None:  # it died before anybody asked
            callback(self._llm.death)

    def shutdown(self) -> None:
        self._llm.shutdown()

    def check_integrity(self) -> None:
        self._core.check_integrity()
