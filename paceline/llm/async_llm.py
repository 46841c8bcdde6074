"""`AsyncLLM`: an engine in a thread of its own, and async streams of what it makes."""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

from paceline.core.faults import request_error
from paceline.core.foreign_options import CALL, take_foreign
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.core.step_record import Load, StepObserver
from paceline.engine.arg_utils import EngineArgs
from paceline.engine.build import Engine
from paceline.engine.core import EngineCore
from paceline.engine.job import Job
from paceline.engine.processor import Prompt
from paceline.errors import EngineDeadError, InvalidOptionError, InvalidRequestError, PacelineError
from paceline.llm.delivery import Delivery
from paceline.llm.output_stream import News, OutputStream, post
from paceline.llm.step_watch import StepWatch
from paceline.llm.sync_llm import DEFAULT_MODEL, LLM, Message, Speculative
from paceline.llm.worker import in_compiler, in_worker
from paceline.models.loader import LoadedModel
from paceline.models.tokenizer import Tokenizer

logger = logging.getLogger("paceline")

Result = TypeVar("Result")


class AsyncLLM:
    """Every request is an async stream that can be cancelled."""

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
        self._streams: dict[str, OutputStream] = {}
        self._delivery = Delivery(self._news)
        self._calls: set[Future[Any]] = set()  # of `call_engine`, not answered yet
        self._standing: list[Callable[[EngineCore], None]] = []  # those that wait for something; the engine's thread's
        self._ids = itertools.count()
        self._dead: Exception | None = None
        self._paused = False
        self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        return cls(**engine_args.given())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: RequestOutputKind | None = None,  # None: what sampling_params say
        **others: Any,  # vLLM's, without effect: core/foreign_options.py
    ) -> AsyncIterator[RequestOutput]:
        """The request's state whenever it changed. Closing the iterator, or cancelling its task, aborts the request.

        With another `output_kind`: what is new since the iterator was last asked, or only the last state."""
        take_foreign("generate", CALL, others)
        request_id = request_id or f"async-{next(self._ids)}"
        params = sampling_params or self._llm.get_default_sampling_params()
        job = await self._job(request_id, prompt, params)
        stream = self._open(job, output_kind or params.output_kind)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._streams.pop(request_id, None)
            self._commands.put(partial(self._leave, stream=stream))

    async def _job(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Job:
        self._check_id(request_id)
        await self._compile(params)
        make = self.engine.processor.job
        return await in_worker(_size(prompt, params), lambda: make(request_id, prompt, params))

    async def _compile(self, params: SamplingParams) -> None:
        """A grammar that is new: it may take a second, in which calls without one do not wait."""
        wanted, grammars = params.structured_outputs, self.engine.core.grammars
        if wanted is not None and grammars.known(wanted) is None:
            await in_compiler(lambda: grammars.compile(wanted))

    def _open(self, job: Job, output_kind: RequestOutputKind) -> OutputStream:
        self._check_id(job.request_id)  # again: another may have taken it while the job was made
        stream = self._streams[job.request_id] = OutputStream(job, output_kind)
        self._commands.put(lambda core: self._admit(core, stream))
        if self._dead is not None:  # looked at after the stream is known, so that no ending can be missed
            stream.put(self._dead)
        return stream

    def _check_id(self, request_id: str) -> None:
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use")

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, as `generate` continues a text."""
        return self.generate(self._llm.chat_prompt(messages), sampling_params, request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now; their streams end with what they have, and the finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._streams.get(one)
            if stream is not None:
                self._commands.put(partial(self._end_early, stream=stream))

    def _end_early(self, core: EngineCore, stream: OutputStream) -> None:
        if not stream.job.finished:
            stream.job.abort(core)
            self._delivery.tell(stream)

    def _leave(self, core: EngineCore, stream: OutputStream) -> None:
        self._delivery.forget(stream)
        stream.job.abort(core)

    async def check_health(self) -> None:
        """Raises what ended the engine, where it does not run any more."""
        if self._dead is not None:
            raise self._dead

    async def pause_generation(self, *, mode: str = "abort") -> None:
        """No pass is computed until `resume_generation`. Requests that run are ended, or kept (mode "keep")."""
        if mode not in ("abort", "keep"):
            raise InvalidOptionError(f"mode must be 'abort' or 'keep', got {mode!r}: to wait, read your streams first")
        if mode == "abort":
            await self.abort(list(self._streams))
        await self._set_paused(True)

    async def resume_generation(self) -> None:
        await self._set_paused(False)

    async def is_paused(self) -> bool:
        return self._paused

    async def _set_paused(self, paused: bool) -> None:
        def command(core: EngineCore) -> None:
            self._paused = paused
            self._delivery.flush()

        await self.call_engine(command)

    async def call_engine(
        self, work: Callable[[EngineCore], Result], when: Callable[[EngineCore], bool] | None = None
    ) -> Result:
        """Do something in the engine's thread, between two steps; what it returns or raises comes back here.

        With `when`: after the first step, or other call, from which on that holds, and before the next step."""
        future: Future[Result] = Future()
        self._calls.add(future)

        def command(core: EngineCore) -> None:
            try:
                if when is not None and not future.cancelled() and not when(core):
                    self._standing.append(command)
                    return
                result = work(core) if future.set_running_or_notify_cancel() else None
            except BaseException as error:
                self._fail(future, error)
            else:
                with suppress(InvalidStateError):  # it was cancelled
                    future.set_result(cast(Result, result))

        self._commands.put(command)
        if self._dead is not None:  # looked at after the call is known, so that no ending can be missed
            self._fail(future, self._dead)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    def look_again(self) -> None:
        """What calls with `when` wait for may have come from outside of the engine."""
        self._commands.put(lambda core: None)

    def _fail(self, future: Future[Any], error: BaseException) -> None:
        with suppress(InvalidStateError):  # it is done, or was cancelled
            future.set_exception(error)

    async def reset_prefix_cache(self, **others: Any) -> bool:
        """No later prompt finds the keys and values of an earlier one."""
        take_foreign("reset_prefix_cache", CALL, others)
        self._commands.put(lambda core: core.kv.forget_all())
        return True

    def get_default_sampling_params(self) -> SamplingParams:
        return self._llm.get_default_sampling_params()

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Options of `SamplingParams` that hold where a request says nothing."""
        return self._llm.default_sampling

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    @property
    def engine(self) -> Engine:
        return self._llm.engine

    @property
    def death(self) -> Exception | None:
        """Why the engine does not run any more; None while it does."""
        return self._dead

    @property
    def max_model_len(self) -> int:
        return self.engine.config.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.engine.config.max_num_seqs

    @property
    def vocab_size(self) -> int:
        return self.engine.model.config.vocab_size

    @property
    def cache_config(self) -> dict[str, str]:
        config = self.engine.config
        return {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_kv_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }

    def method_of(self, params: SamplingParams) -> str:
        """The drafting method that a request with these options gets; "none": plain decoding."""
        return self._llm.method_of(params)

    def prepare_structured_outputs(self) -> None:
        """Make ready what the first request with `structured_outputs` would wait for; about a second."""
        self.engine.core.grammars.prepare()

    def load(self) -> Load:
        core = self.engine.core
        return Load(len(core.scheduler.running), len(core.scheduler.waiting), core.kv.usage)

    def stats(self) -> dict[str, Any]:
        return self._llm.stats()

    def watch(self, observer: StepObserver) -> None:
        """Tell `observer` of every step from now on, in the engine's thread."""
        self.engine.core.observers.append(StepWatch(self._llm, observer))

    def check_integrity(self) -> None:
        """Only after `shutdown`: asserts that no KV block was lost."""
        self.engine.core.check_integrity()

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
                self._delivery.note(core.step())
                self._try_again(core)
            self._end(EngineDeadError("the engine was shut down"))
        except BaseException as error:  # whatever it is, no stream may wait for ever
            self._die(error)

    def _take_commands(self, core: EngineCore) -> bool:
        """Carry out what callers asked for, waiting when there is nothing to compute. False: shut down."""
        while True:
            try:
                command = self._commands.get(block=self._paused or not core.has_requests)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)
            self._try_again(core)

    def _try_again(self, core: EngineCore) -> None:
        standing, self._standing = self._standing, []
        for command in standing:
            command(core)

    def _admit(self, core: EngineCore, stream: OutputStream) -> None:
        try:
            stream.job.start(core)
            self._delivery.follow(stream)
            if stream.job.finished:  # it was resumed after its last token
                self._delivery.tell(stream)
        except BaseException as error:
            stream.job.abort(core)
            told = error if isinstance(error, PacelineError) else request_error("starting the request", error)
            post(stream.loop, [(stream, told)])

    def _news(self, job: Job) -> News:
        try:
            return job.delta()
        except BaseException as error:
            job.abort(self.engine.core)
            return request_error("making its output", error)

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
        self._delivery.flush()
        for call in list(self._calls):
            self._fail(call, error)
        for stream in list(self._streams.values()):
            post(stream.loop, [(stream, error)])


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
