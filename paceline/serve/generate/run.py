"""A call through the engine: each delta of each prompt is measured and handed to the call's writer.

There is one queue between the engine and the socket, the engine's own (llm/output_stream.py): while a writer waits for
its client, deltas wait there, merged, and nothing else is kept.
"""

import asyncio
from contextlib import aclosing
from typing import Protocol

from paceline.core.outputs import RequestOutput
from paceline.errors import GrammarLimitError, InvalidRequestError
from paceline.serve.generate.call import Call
from paceline.serve.generate.constraint import refusal
from paceline.serve.generate.service import Service
from paceline.serve.observe.metrics import TokenTimes


class Writer(Protocol):
    async def take(self, prompt: int, output: RequestOutput) -> None: ...  # a delta of the call's prompt


async def run(service: Service, call: Call, writer: Writer) -> None:
    """Returns when all prompts are finished; the first failure, or a cancellation, aborts what still runs."""
    prompts = range(len(call.prompts))
    sequence_ids = [sequence_id for prompt in prompts for sequence_id in call.sequence_ids(prompt)]
    if call.body.prediction is not None:
        call.counts = [service.latest_steps.follow(sequence_id) for sequence_id in sequence_ids]
    try:
        if len(prompts) == 1:
            await _run_prompt(service, call, 0, writer)
        else:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    group.create_task(_run_prompt(service, call, prompt, writer))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for sequence_id in sequence_ids:
            service.latest_steps.forget(sequence_id)


async def _run_prompt(service: Service, call: Call, prompt: int, writer: Writer) -> None:
    try:
        await _read_prompt(service, call, prompt, writer)
    except (InvalidRequestError, GrammarLimitError) as error:
        raise refusal(call, error) from None


async def _read_prompt(service: Service, call: Call, prompt: int, writer: Writer) -> None:
    times = TokenTimes(service.metrics, call.arrival_s, call.params.n)
    outputs = service.backend.generate(call.prompts[prompt], call.params, call.request_id(prompt), call.cache_salt)
    async with aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            if call.only_echo:
                _leave_out(output)
            times.note(sum(len(choice.token_ids) for choice in output.outputs))
            if output.error is not None:
                raise output.error
            for choice in output.outputs:
                if choice.finish_reason is not None:
                    service.metrics.finished.inc(1, choice.finish_reason)
            if output.prompt_token_logprobs is not None:
                call.prompt_logprobs[prompt] = output.prompt_token_logprobs
            if output.metrics is not None:
                call.metrics[prompt] = output.metrics
                service.metrics.finish(output.metrics, call.params.n, call.params.max_tokens)
            await writer.take(prompt, output)


def _leave_out(output: RequestOutput) -> None:
    """All that was generated, where only the prompt was asked for."""
    for choice in output.outputs:
        choice.text, choice.token_ids, choice.token_sources = "", [], []
        choice.token_logprobs = None if choice.token_logprobs is None else []
        choice.finish_reason, choice.stop_reason = choice.finish_reason and "length", None
