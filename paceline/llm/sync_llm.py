"""`LLM`: an engine in the calling thread."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.engine.build import Engine, build_engine
from paceline.engine.config import EngineConfig
from paceline.engine.job import Job
from paceline.engine.processor import Prompt
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.models.loader import LoadedModel
from paceline.models.tokenizer import Tokenizer
from paceline.spec.config.request_choice import choose
from paceline.spec.config.speculative_config import SpeculativeConfig

DEFAULT_MODEL = "smollm2-135m"

Message = Mapping[str, Any]
Speculative = Mapping[str, Any] | SpeculativeConfig | None


class LLM:
    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_MODEL,
        speculative_config: Speculative = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantization: str | None = "auto",
        batch_invariant: bool | None = None,
        kernels: str = "auto",
        num_threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        max_token_delay_s: float | None = None,
        seed: int | None = None,
    ) -> None:
        engine_config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            max_token_delay_s=max_token_delay_s,
        )
        self.engine: Engine = build_engine(
            model,
            speculative_config,
            engine_config,
            seed=seed,
            dtype=dtype,
            device=device,
            quantization=quantization,
            batch_invariant=batch_invariant,
            kernels=kernels,
            num_threads=num_threads,
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[int, int], None] | None = None,  # (finished prompts, all prompts)
    ) -> list[RequestOutput]:
        """Complete one prompt or many, together. A prompt is text, token ids, or {"prompt_token_ids": [...]}."""
        prompt_list = _as_list(prompts)
        params = _params_for(sampling_params, len(prompt_list))
        jobs = [self._job(prompt, p) for prompt, p in zip(prompt_list, params, strict=True)]
        for _ in self._run(jobs):
            if on_step is not None:
                on_step(sum(job.finished for job in jobs), len(jobs))
        return [job.output() for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many: lists of {"role": ..., "content": ...}."""
        if not messages:
            raise InvalidRequestError("the conversation is empty: give at least one message")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(m) for m in conversations], sampling_params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Sequence[Message]) -> dict[str, list[int]]:
        """The conversation as a prompt, through the model's chat template."""
        return {"prompt_token_ids": self.get_tokenizer().chat_token_ids(messages)}

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> Iterator[RequestOutput]:
        """The request's state after every step that brought something new; the last one is finished.

        With another `output_kind`: what was new in each of these steps, or only the last state."""
        job = self._job(prompt, sampling_params or SamplingParams())
        for updated in self._run([job]):
            if not updated:
                continue
            if output_kind is RequestOutputKind.DELTA:
                yield job.delta()
            elif output_kind is RequestOutputKind.CUMULATIVE or job.finished:
                yield job.output()

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Job:
        """Queue a prompt and come back at once, for callers that step the engine themselves.

        The job says whether it is `finished`; its `output()` is its state at any time, once it has been stepped."""
        job = self._job(prompt, sampling_params or SamplingParams())
        job.start(self.engine.core)
        return job

    def step(self) -> None:
        """One pass for everything that was submitted."""
        self.engine.core.step()

    def cancel(self, job: Job) -> None:
        """End a job now; its blocks are free when this returns."""
        job.abort(self.engine.core)

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.model.tokenizer

    def method_of(self, params: SamplingParams) -> str:
        """The drafting method that a request with these options gets; "none": plain decoding."""
        return choose(self.engine.core.speculator.config, params.speculative).method

    def stats(self) -> dict[str, Any]:
        """Speculation's counts per method, and where the steps' time went."""
        core = self.engine.core
        return {
            "num_steps": core.clock.num_steps,
            "num_passes_ahead": core.clock.num_ahead,
            "step_seconds": dict(core.clock.seconds),
            "kv_usage": core.kv.usage,
            "speculation": core.speculator.stats(),
            "structured": core.masks.figures(),
        }

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        return self.engine.processor.job(str(next(self._ids)), prompt, params)

    def _run(self, jobs: Sequence[Job]) -> Iterator[bool]:
        """Step until all jobs are done; yields whether the step brought news. Leaving early aborts what is left."""
        core = self.engine.core
        try:
            for job in jobs:
                job.start(core)
            unfinished = list(jobs)
            while unfinished:
                if unfinished[-1].finished:
                    unfinished.pop()
                    continue
                with _interrupt_after():
                    updated = core.step()
                yield bool(updated)
        finally:
            for job in jobs:
                job.abort(core)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not prompts:
        raise InvalidRequestError("there is no prompt: give text, token ids, or a list of prompts")
    return [prompts] if isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item, arg-type]


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidOptionError(f"{len(params)} sampling_params for {count} prompts: give one, or one for each")
    return list(params)


@contextmanager
def _interrupt_after() -> Iterator[None]:
    """Ctrl-C waits for the step to end, so that it never leaves a step half done. A second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
