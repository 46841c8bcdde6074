"""From a request body to the engine's states: one path for chat and completions, streamed or not."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.serve.config import ServerConfig
from paceline.serve.generate.deltas import Cursor
from paceline.serve.generate.params import prompt_token_ids, sampling_params
from paceline.serve.generate.served_engine import Backend
from paceline.serve.http.errors import ApiError
from paceline.serve.http.gate import Gate
from paceline.serve.http.limits import check_options, num_prompts
from paceline.serve.http.logs import log
from paceline.serve.http.request_bodies import ChatCompletionRequest, GenerationRequest
from paceline.serve.http.tenants import Tenant
from paceline.serve.observe.latest_steps import Recorder
from paceline.serve.observe.metrics import Metrics


@dataclass(slots=True)
class Call:
    """One HTTP call: prompts x n choices under one id."""

    id: str
    model: str
    body: GenerationRequest
    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    arrival_s: float = field(default_factory=time.perf_counter)
    counts: list[DraftCounts] = field(default_factory=list)  # so far, one per choice, where a prediction was given
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)  # by prompt, where asked for
    metrics: dict[int, RequestMetrics] = field(default_factory=dict)  # by prompt, once it is finished

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_entries(self) -> int:
        """At most how many tokens and log-probabilities the answer lists: what it takes to write it down."""
        params, num_prompt_tokens = self.params, sum(map(len, self.prompts))
        assert params.max_tokens is not None
        entries = self.num_choices * params.max_tokens * (1 + (params.logprobs or 0))
        return entries + num_prompt_tokens * params.n * (1 + (params.prompt_logprobs or 0))

    def log_fields(self) -> dict[str, Any]:
        """For the access log: sizes and figures, never text."""
        parts = self.metrics.values()
        return {
            "call": self.id,
            "num_choices": self.num_choices,
            "num_prompt_tokens": sum(len(prompt) for prompt in self.prompts),
            "num_output_tokens": sum(m.num_output_tokens for m in parts),
            "num_steps": sum(m.num_steps for m in parts),
            "ttft_s": min((m.ttft_s for m in parts if m.ttft_s is not None), default=None),
            "stream": bool(self.body.stream),
            "speculative": (self.body.speculative or {}).get("method"),
            "prediction": self.body.prediction is not None,
        }

    def sequence_ids(self, prompt: int) -> list[str]:
        """The engine's names for the samples of one prompt."""
        base = self.request_id(prompt)
        return [base] if self.params.n == 1 else [f"{base}-{i}" for i in range(self.params.n)]

    def request_id(self, prompt: int) -> str:
        return self.id if len(self.prompts) == 1 else f"{self.id}.{prompt}"


class Service:
    """What the routes share."""

    def __init__(self, backend: Backend, config: ServerConfig) -> None:
        self.backend = backend
        self.config = config
        self.metrics = Metrics()
        self.recorder = Recorder()
        self.gate = Gate(backend.max_num_seqs, config.max_queue_len, config.request_timeout_s)
        self.engine_dead = False
        self.begin_s = time.time()
        backend.watch(self.recorder.observe)
        backend.when_dead(self._note_death)

    def _note_death(self, error: Exception) -> None:
        self.engine_dead = True
        log("engine_dead", level=logging.CRITICAL, error=error)

    def num_sequences(self, body: GenerationRequest) -> int:
        """How many sequences a call asks for, before anything is tokenized."""
        total = num_prompts(body) * (body.n or 1)
        if total > self.config.max_choices:
            raise ApiError(
                400,
                f"prompts x n is {total} and this server takes at most {self.config.max_choices} in one call: split it",
                code="too_many_choices",
                param="n",
            )
        return total

    def check_model(self, name: str | None) -> str:
        names = self.config.model_names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name!r} is not here: this server has {', '.join(names)}",
                code="model_not_found",
                param="model",
            )
        return name or names[0]

    async def prepare(self, body: GenerationRequest, request_id: str, tenant: Tenant) -> Call:
        """Everything that can be wrong with a call short of the engine's own checks is found here."""
        model = self.check_model(body.model)
        check_options(body, self.config)
        prompts = await prompt_token_ids(body, self.backend, self.config)
        params = await sampling_params(body, [len(p) for p in prompts], self.backend, self.config)
        kind = "chatcmpl" if isinstance(body, ChatCompletionRequest) else "cmpl"
        call = Call(f"{kind}-{request_id}", model, body, prompts, params, tenant.cache_salt(body.cache_salt))
        self.metrics.prompt_tokens.inc(sum(len(p) for p in prompts))
        if self.config.log_prompts:
            log("prompt", id=call.id, prompts=[self.backend.tokenizer.decode(p, False) for p in prompts])
        return call

    def cursors(self, call: Call) -> list[Cursor]:
        """One per choice."""
        method = self.backend.method_of(call.params) if call.body.return_token_sources else None
        return [Cursor(i, self.backend.tokenizer, method) for i in range(call.num_choices)]

    async def states(self, call: Call) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt, its newest state) until all are finished. Closing the iterator aborts what still runs."""
        self._follow(call)
        try:
            merged = self._one(call, 0) if len(call.prompts) == 1 else self._many(call)
            async with aclosing(merged):  # type: ignore[type-var]
                async for item in merged:
                    yield item
        finally:
            for prompt in range(len(call.prompts)):
                for request_id in call.sequence_ids(prompt):
                    self.recorder.forget(request_id)

    def _follow(self, call: Call) -> None:
        if call.body.prediction is None:
            return
        ids = [request_id for prompt in range(len(call.prompts)) for request_id in call.sequence_ids(prompt)]
        call.counts = [self.recorder.follow(request_id) for request_id in ids]

    async def _one(self, call: Call, prompt: int) -> AsyncIterator[tuple[int, RequestOutput]]:
        """The states of one prompt, its latencies observed on the way."""
        metrics = self.metrics
        last_s, num_known = call.arrival_s, 0
        outputs = self.backend.generate(call.prompts[prompt], call.params, call.request_id(prompt), call.cache_salt)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                now_s = time.perf_counter()
                num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
                num_new = num_tokens - num_known
                if num_new:
                    metrics.generation_tokens.inc(num_new)
                    if num_known == 0:
                        metrics.ttft.observe(now_s - call.arrival_s)
                    else:  # n samples advance side by side: each got its share of the new tokens
                        metrics.inter_token.observe((now_s - last_s) * call.params.n / num_new, num_new)
                    last_s, num_known = now_s, num_tokens
                if output.error is not None:
                    raise output.error
                if output.prompt_logprobs is not None:
                    call.prompt_logprobs[prompt] = output.prompt_logprobs
                if output.finished:
                    self._finish(call, prompt, output)
                yield prompt, output

    def _finish(self, call: Call, prompt: int, output: RequestOutput) -> None:
        for choice in output.outputs:
            self.metrics.finished.inc(1, choice.finish_reason or "unknown")
        if output.metrics is not None:
            call.metrics[prompt] = output.metrics
            self.metrics.finish(output.metrics)

    async def _many(self, call: Call) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Several prompts at once, states as they come; the first failure ends all."""
        newest: dict[int, RequestOutput] = {}  # a slow reader skips states, so this never grows
        changed = asyncio.Event()

        async def pump(prompt: int) -> None:
            try:
                async for _, output in self._one(call, prompt):
                    newest[prompt] = output
                    changed.set()
            finally:
                changed.set()

        tasks = [asyncio.create_task(pump(prompt)) for prompt in range(len(call.prompts))]
        try:
            while newest or not all(task.done() for task in tasks):
                await changed.wait()
                changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()  # raises what went wrong
                while newest:
                    yield newest.popitem()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
