"""`Backend` over `AsyncLLM`: the engine's own objects become the few records that the server knows."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.llm import AsyncLLM
from paceline.serve.backend import Load, PassRecord, StepObserver, StepRecord

if TYPE_CHECKING:
    from paceline.spec.proposer import RequestPass, StepContext
    from paceline.spec.speculator import Speculator


class WatchedSpeculator:
    """The engine's speculator, and a listener that hears of every step right after it."""

    def __init__(self, speculator: "Speculator", on_step: "Callable[[StepContext], None]") -> None:
        self._speculator = speculator
        self._on_step = on_step

    def observe(self, step: "StepContext") -> None:
        self._speculator.observe(step)
        self._on_step(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculator, name)


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
        self.tokenizer = llm.get_tokenizer()

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        return self._llm.generate({"prompt_token_ids": token_ids}, params, request_id)

    def load(self) -> Load:
        scheduler = self._core.scheduler
        return Load(len(scheduler.running), len(scheduler.waiting), self._core.kv.usage)

    def speculation_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._llm.stats()["speculation"]
        return stats

    def watch(self, observer: StepObserver) -> None:
        def on_step(step: "StepContext") -> None:
            total_s = sum(self._core.clock.seconds.values())
            seconds, self._known_s = total_s - self._known_s, total_s
            observer(StepRecord([self._record(part) for part in step.passes], seconds))

        self._core.speculator = cast("Speculator", WatchedSpeculator(self._core.speculator, on_step))

    def _record(self, part: "RequestPass") -> PassRecord:
        return PassRecord(
            request_id=part.request.request_id,
            method=self._method(part.request.sampling_params.speculative or {}),
            num_rows=len(part.rows),
            num_prompt_rows=part.num_committed if part.num_committed > 1 else 0,
            draft=part.draft,
            accepted=part.accepted,
            new_token_ids=part.new_token_ids,
        )

    def _method(self, chosen: Mapping[str, Any]) -> str:
        """Who drafts for a request that chose so; only asked for requests that the engine has let in."""
        config = self._core.speculator.config
        default = "none" if config is None else config.method
        if chosen.get("off"):
            return "none"
        return str(chosen.get("method") or ("prediction" if "prediction" in chosen else default))

    def shutdown(self) -> None:
        self._llm.shutdown()

    def check_integrity(self) -> None:
        self._core.check_integrity()
