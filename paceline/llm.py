"""The two ways to use Paceline from Python.

>>> from paceline import LLM, SamplingParams                                        # doctest: +SKIP
>>> llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

Without `speculative_config` the method is `auto`, which speculates where it pays; {"method": "none"} decodes plainly.

`LLM` runs the engine in the calling thread. `AsyncLLM` runs it in a thread of its own and hands out async streams.

A request that fails says so in its output (`error`) and leaves the others alone. A model whose pass raises, or memory
that runs out, stops an `AsyncLLM` for good: its streams end with `EngineDeadError`, and `on_death` is called.
"""

import asyncio
import itertools
import logging
import queue
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from paceline.core.faults import request_error
from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.engine.build import Engine, build_engine
from paceline.engine.config import EngineConfig
from paceline.engine.core import EngineCore, RequestState
from paceline.engine.processor import Job, Prompt
from paceline.errors import EngineDeadError, InvalidOptionError, InvalidRequestError, PacelineError
from paceline.models.loader import LoadedModel
from paceline.models.tokenizer import Tokenizer
from paceline.spec.config.speculative_config import SpeculativeConfig

logger = logging.getLogger("paceline")

DEFAULT_MODEL = "smollm2-135m"
# Characters of a call that are prepared in the event loop's own thread, at about a microsecond each. A choice: at half
# of it more calls pay for a change of thread, at twice of it other streams wait twice as long.
INLINE_CHARS = 2_000

Message = Mapping[str, Any]
Speculative = Mapping[str, Any] | SpeculativeConfig | None


class LLM:
    """An engine in the calling thread."""

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

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The request's state after every step that brought something new; the last one is finished."""
        job = self._job(prompt, sampling_params or SamplingParams())
        for updated in self._run([job]):
            if updated:
                yield job.output()

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Job:
        """Queue a prompt and come back at once, for callers that step the engine themselves.

        The job says whether it is `finished`; its `output()` is its state at any time, once it has been stepped."""
        job = self._job(prompt, sampling_params or SamplingParams())
        _add(self.engine.core, job)
        return job

    def step(self) -> None:
        """One pass for everything that was submitted."""
        self.engine.core.step()

    def cancel(self, job: Job) -> None:
        """End a job now; its blocks are free when this returns."""
        _abort(self.engine.core, job)

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.model.tokenizer

    def stats(self) -> dict[str, Any]:
        """Speculation's counts per method, and where the steps' time went."""
        core = self.engine.core
        return {
            "num_steps": core.clock.num_steps,
            "step_seconds": dict(core.clock.seconds),
            "kv_usage": core.kv.usage,
            "speculation": core.speculator.stats(),
        }

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        return self.engine.processor.job(str(next(self._ids)), prompt, params)

    def _run(self, jobs: Sequence[Job]) -> Iterator[bool]:
        """Step until all jobs are done; yields whether the step brought news. Leaving early aborts what is left."""
        core = self.engine.core
        try:
            for job in jobs:
                _add(core, job)
            while not all(job.finished for job in jobs):
                with _interrupt_after():
                    updated = core.step()
                yield bool(updated)
        finally:
            for job in jobs:
                _abort(core, job)


class _Stream:
    """Where the engine's thread leaves a job's newest state. A slow reader skips states, never tokens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.latest: RequestOutput | Exception | None = None

    def post(self, item: RequestOutput | Exception) -> None:
        self.latest = item
        _wake(self.loop, [self])

    async def next(self) -> RequestOutput:
        await self.changed.wait()
        self.changed.clear()
        assert self.latest is not None
        if isinstance(self.latest, Exception):
            raise self.latest
        return self.latest


def _wake(loop: asyncio.AbstractEventLoop, streams: Sequence[_Stream]) -> None:
    """Tell the readers of some streams, all in one loop, that there is news: waking a loop costs a system call."""

    def tell() -> None:
        for stream in streams:
            stream.changed.set()

    with suppress(RuntimeError):  # the loop is closed: nobody is listening any more
        loop.call_soon_threadsafe(tell)


class AsyncLLM:
    """An engine in a thread of its own; every request is an async stream that can be cancelled."""

    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_MODEL,
        speculative_config: Speculative = None,
        *,
        on_death: Callable[[Exception], None] | None = None,  # called in the engine's thread, after all streams ended
        **options: Any,
    ) -> None:
        self._llm = LLM(model, speculative_config, **options)
        self.on_death = on_death
        self._commands: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The request's state whenever it changed. Closing the iterator, or cancelling its task, aborts the request."""
        request_id = request_id or f"async-{next(self._ids)}"
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        job = await self._job(request_id, prompt, sampling_params or SamplingParams())
        if request_id in self._streams:  # since then
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        stream = self._streams[request_id] = _Stream(job)
        self._commands.put(lambda core: self._admit(core, stream))
        if self._dead is not None:  # looked at after the stream is known, so that no ending can be missed
            stream.post(self._dead)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._streams.pop(request_id, None)
            self._commands.put(lambda core: _abort(core, job))

    async def _job(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Job:
        make = self.engine.processor.job
        if _size(prompt, params) <= INLINE_CHARS:
            return make(request_id, prompt, params)
        return await asyncio.to_thread(make, request_id, prompt, params)

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        outputs = self.generate(self._llm.chat_prompt(messages), sampling_params, request_id)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                yield output

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    @property
    def engine(self) -> Engine:
        return self._llm.engine

    @property
    def death(self) -> Exception | None:
        """Why the engine does not run any more; None while it does."""
        return self._dead

    def stats(self) -> dict[str, Any]:
        return self._llm.stats()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Stop the engine; streams still open end with an error."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _loop(self) -> None:
        core = self.engine.core
        try:
            while self._take_commands(core):
                self._publish(core, core.step())
            self._end(EngineDeadError("the engine was shut down"))
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._die(error)

    def _take_commands(self, core: EngineCore) -> bool:
        """Carry out what callers asked for, waiting when there is nothing to compute. False: shut down."""
        while True:
            try:
                command = self._commands.get(block=not core.has_requests)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)

    def _admit(self, core: EngineCore, stream: _Stream) -> None:
        try:
            _add(core, stream.job)
        except BaseException as error:
            _abort(core, stream.job)
            stream.post(error if isinstance(error, PacelineError) else request_error("starting the request", error))

    def _publish(self, core: EngineCore, updated: Sequence[RequestState]) -> None:
        changed = {id(state) for state in updated}
        by_loop: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for stream in list(self._streams.values()):
            if any(id(state) in changed for state in stream.job.states):
                try:
                    stream.latest = stream.job.output()
                except BaseException as error:
                    stream.latest = request_error("making its output", error)
                    _abort(core, stream.job)
                by_loop.setdefault(stream.loop, []).append(stream)
        for loop, streams in by_loop.items():
            _wake(loop, streams)

    def _die(self, error: BaseException) -> None:
        logger.critical("the engine stopped on an internal error and must be rebuilt", exc_info=error)
        death = EngineDeadError(f"the engine stopped on an internal error: {error!r}")
        death.__cause__ = error
        self._end(death)
        if self.on_death is not None:
            try:
                self.on_death(death)
            except Exception:
                logger.exception("on_death %r raised", self.on_death)

    def _end(self, error: Exception) -> None:
        self._dead = error
        for stream in list(self._streams.values()):
            stream.post(error)


def _add(core: EngineCore, job: Job) -> None:
    for request in job.requests:
        job.states.append(core.add_request(request))


def _abort(core: EngineCore, job: Job) -> None:
    for state in job.states:  # only what was added: an id that was refused is somebody else's
        if not state.request.finished:
            core.abort(state.request.request_id)


def _size(prompt: Prompt, params: SamplingParams) -> int:
    """How much there is to prepare for a call, in characters: ten ids are checked in the time of one."""
    if isinstance(prompt, Mapping):  # beside it there may be a cache_salt
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids", ()))
    prediction = (params.speculative or {}).get("prediction")
    size = sum(len(words) * 10 + sum(map(len, words)) for words in (params.stop_strings, params.bad_words))
    for given in (prompt, prediction, params.allowed_token_ids, params.stop_token_ids, params.logit_bias):
        if isinstance(given, Sized):
            size += len(given) if isinstance(given, str) else len(given) // 10
    return size


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
