"""`LLM`: an engine in the calling thread."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.foreign_options import CALL, ENGINE, take_foreign
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.progress import progress
from paceline.core.sampling_params import SamplingParams
from paceline.engine.arg_utils import EngineArgs
from paceline.engine.build import Engine, build_engine
from paceline.engine.config import EngineConfig
from paceline.engine.job import Job
from paceline.engine.processor import Prompt
from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.llm.interrupts import Interrupts
from paceline.llm.metrics import FinishedRequests, Gauge, Metric, speculation_metrics
from paceline.llm.profile import Profiler, ProfilerConfig
from paceline.models.generation_config import sampling_defaults
from paceline.models.loader import LoadedModel
from paceline.models.tokenizer import Tokenizer
from paceline.spec.config.request_choice import choose
from paceline.spec.config.speculative_config import SpeculativeConfig

logger = logging.getLogger("paceline")

DEFAULT_MODEL = "smollm2-135m"

Message = Mapping[str, Any]
Speculative = Mapping[str, Any] | SpeculativeConfig | None


class LLM:
    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_MODEL,
        speculative_config: Speculative = None,
        *,
        dtype: str | None = "auto",
        device: str | None = "auto",
        quantization: str | None = "auto",
        batch_invariant: bool | None = None,
        kernels: str | None = "auto",
        kv_cache_dtype: str | None = "auto",  # CPU: float16, int16 or int8; CUDA: fp8
        num_threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = 64,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool | None = True,
        max_token_delay_s: float | None = None,
        kv_offload: str | int | None = None,  # keep the KV of finished requests: bytes of host memory, or a folder
        seed: int | None = None,
        generation_config: str | None = "auto",  # where defaults of sampling come from: auto, vllm (none), or a folder
        override_generation_config: Mapping[str, Any] | None = None,
        chat_template: str | Path | None = None,  # Jinja, or a file of it, instead of the model's own
        tokenizer: str | None = None,  # the model's own is the only one
        profiler_config: Mapping[str, Any] | ProfilerConfig | None = None,  # for start_profile and stop_profile
        num_gpu_blocks_override: int | None = None,  # vLLM's name of num_kv_blocks
        spec_method: str | None = None,  # shorthands for keys of speculative_config
        spec_model: str | None = None,
        spec_tokens: int | None = None,
        **others: Any,  # vLLM's, without effect: core/foreign_options.py
    ) -> None:
        """None means the default, so that what was parsed by `EngineArgs` may be given whole; only `quantization=None`
        says something: compute in floating point."""
        take_foreign("LLM", ENGINE, others)
        self._profiler = Profiler(ProfilerConfig.parse(profiler_config))
        if tokenizer not in (None, model):
            raise InvalidOptionError(f"tokenizer={tokenizer!r} is not supported: put it into the model's folder")
        if None not in (num_kv_blocks, num_gpu_blocks_override):
            raise InvalidOptionError("num_kv_blocks and num_gpu_blocks_override are the same: give one")
        shorthands = {"method": spec_method, "model": spec_model, "num_speculative_tokens": spec_tokens}
        speculative_config = with_shorthands(speculative_config, shorthands)
        engine_config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=64 if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=16 if block_size is None else block_size,
            num_kv_blocks=num_gpu_blocks_override if num_kv_blocks is None else num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=True if enable_prefix_caching is None else enable_prefix_caching,
            max_token_delay_s=max_token_delay_s,
            kv_offload=kv_offload,
        )
        self.engine: Engine = build_engine(
            model,
            speculative_config,
            engine_config,
            seed=seed,
            dtype=dtype or "auto",
            device=device or "auto",
            quantization=quantization,
            batch_invariant=batch_invariant,
            kernels=kernels or "auto",
            kv_cache_dtype=kv_cache_dtype or "auto",
            num_threads=num_threads,
        )
        if chat_template is not None:
            self.get_tokenizer().use_chat_template(chat_template)
        self.default_sampling = sampling_defaults(
            self.engine.model.path, generation_config or "auto", override_generation_config
        )
        if self.default_sampling:
            logger.info("sampling defaults of the model: %s (generation_config='vllm': none)", self.default_sampling)
        self.finished_requests = FinishedRequests()
        self._ids = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls(**engine_args.given())

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where a call gives no `SamplingParams`: the model's own defaults (models/generation_config.py)."""
        return SamplingParams(**self.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,  # a progress bar, on a terminal; or a class like tqdm
        on_step: Callable[[int, int], None] | None = None,  # (finished prompts, all prompts); instead of a bar
        **others: Any,  # vLLM's, without effect: core/foreign_options.py
    ) -> list[RequestOutput]:
        """Complete one prompt or many, together. A prompt is text, token ids, or {"prompt_token_ids": [...]}."""
        take_foreign("generate", CALL, others)
        prompt_list = _as_list(prompts)
        params = self._params_for(sampling_params, len(prompt_list))
        jobs = [self._job(prompt, p) for prompt, p in zip(prompt_list, params, strict=True)]
        with progress(len(jobs), use_tqdm if on_step is None else False) as tell:
            for _ in self._run(jobs):
                if tell is not None or on_step is not None:
                    done = sum(job.finished for job in jobs)
                    if tell is not None:
                        tell(done)
                    if on_step is not None:
                        on_step(done, len(jobs))
        for job in jobs:
            self.note_end(job)
        return [job.output() for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,  # Jinja, instead of the model's own
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,  # the answer goes on where the last message ends
        tools: Sequence[Mapping[str, Any]] | None = None,  # that the chat template tells the model of
        chat_template_kwargs: Mapping[str, Any] | None = None,  # such as {"enable_thinking": False} for Qwen3
        **others: Any,  # vLLM's, without effect: core/foreign_options.py
    ) -> list[RequestOutput]:
        """Answer one conversation or many: lists of {"role": ..., "content": ...}."""
        take_foreign("chat", CALL, others)
        if not messages:
            raise InvalidRequestError("the conversation is empty: give at least one message")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                one,
                add_generation_prompt and not continue_final_message,
                template=chat_template,
                continue_final_message=continue_final_message,
                tools=tools,
                template_options=chat_template_kwargs,
            )
            for one in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any
    ) -> dict[str, list[int]]:
        """The conversation as a prompt, through a chat template; `options` of `Tokenizer.chat_token_ids`."""
        return {"prompt_token_ids": self.get_tokenizer().chat_token_ids(messages, add_generation_prompt, **options)}

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: RequestOutputKind | None = None,  # None: what sampling_params say
    ) -> Iterator[RequestOutput]:
        """The request's state after every step that brought something new; the last one is finished.

        With another `output_kind`: what was new in each of these steps, or only the last state."""
        params = sampling_params or self.get_default_sampling_params()
        output_kind = output_kind or params.output_kind
        job = self._job(prompt, params)
        for updated in self._run([job]):
            if not updated:
                continue
            if output_kind is RequestOutputKind.DELTA:
                yield job.delta()
            elif output_kind is RequestOutputKind.CUMULATIVE or job.finished:
                yield job.output()
        self.note_end(job)

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Job:
        """Queue a prompt and come back at once, for callers that step the engine themselves.

        The job says whether it is `finished`; its `output()` is its state at any time, once it has been stepped."""
        job = self._job(prompt, sampling_params or self.get_default_sampling_params())
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
            **({} if core.offload is None else {"kv_offload": core.offload.figures()}),
        }

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms under vLLM's names and our prefix; of requests, those that have ended."""
        core = self.engine.core
        labels = {"model_name": self.engine.model.name}
        load = {
            "num_requests_running": len(core.scheduler.running),
            "num_requests_waiting": len(core.scheduler.waiting),
            "kv_cache_usage_perc": core.kv.usage,
        }
        gauges: list[Metric] = [Gauge(f"paceline:{name}", labels, value) for name, value in load.items()]
        speculation = speculation_metrics(core.speculator.stats(), labels)
        return [*gauges, *self.finished_requests.metrics(labels), *speculation]

    def start_profile(self) -> None:
        """PyTorch's profiler, until `stop_profile` writes a trace into the folder of `profiler_config`."""
        self._profiler.start()

    def stop_profile(self) -> None:
        self._profiler.stop()

    def reset_prefix_cache(self, **others: Any) -> bool:
        """No later prompt finds the keys and values of an earlier one."""
        take_foreign("reset_prefix_cache", CALL, others)
        self.engine.core.kv.forget_all()
        return True

    def note_end(self, job: Job) -> None:
        """For get_metrics()."""
        self.finished_requests.add((request.finish_reason for request in job.requests), job.metrics)

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise InvalidOptionError(f"{len(params)} sampling_params for {count} prompts: give one, or one for each")
        return list(params)

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        return self.engine.processor.job(str(next(self._ids)), prompt, params)

    def _run(self, jobs: Sequence[Job]) -> Iterator[bool]:
        """Step until all jobs are done; yields whether the step brought news. Leaving early aborts what is left."""
        core = self.engine.core
        try:
            for job in jobs:
                job.start(core)
            unfinished = list(jobs)
            with Interrupts() as interrupts:
                while unfinished:
                    if unfinished[-1].finished:
                        unfinished.pop()
                        continue
                    yield bool(interrupts.after(core.step))
        finally:
            for job in jobs:
                job.abort(core)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    given: list[Any] = list(prompts)
    return [given] if given and isinstance(given[0], int) else given


def with_shorthands(given: Speculative, shorthands: Mapping[str, Any]) -> Speculative:
    """`speculative_config`, overlaid with those of its keys that were given apart."""
    said = {key: value for key, value in shorthands.items() if value is not None}
    if not said:
        return given
    if isinstance(given, SpeculativeConfig):
        raise InvalidOptionError(f"give {', '.join(said)} in the SpeculativeConfig itself")
    return {**(given or {}), **said}
