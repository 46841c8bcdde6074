"""Our own engine, in this process, through `AsyncLLM`: the same path that the server takes."""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.workloads.workload import Prompt
from paceline.core.draft_counts import DraftCounts
from paceline.core.output_merger import OutputMerger
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.core.tokenizer import Tokenizer
from paceline.llm import LLM, AsyncLLM


class EngineBackend:
    def __init__(self, llm: AsyncLLM, speculative_config: Mapping[str, Any] | None, name: str) -> None:
        self.llm = llm
        self._config = speculative_config
        self._name = name
        self._tokenizer = llm.get_tokenizer()

    async def generate(self, prompt: Prompt, sampling: Sampling, index: int) -> Answer:
        params = sampling_params(sampling, index, prompt)
        answer = Answer(prompt.prompt_id, prompt.category, time.perf_counter())
        output = OutputMerger()
        try:
            kind = RequestOutputKind.DELTA
            async for delta in self.llm.generate(asked(prompt, self._tokenizer), params, output_kind=kind):
                answer.event_s.append(time.perf_counter())
                output.add(delta)
        except Exception as error:
            answer.error = f"{type(error).__name__}: {error}"
            return answer
        fill(answer, output.output())
        return answer

    def counts(self) -> DraftCounts | None:
        return None  # every answer carries its own

    def figures(self) -> dict[str, float]:
        return engine_figures(self.llm)

    def describe(self) -> dict[str, Any]:
        return {"backend": "engine", "model": self._name, "speculative_config": self._config}

    def close(self) -> None:
        self.llm.shutdown()


def sampling_params(sampling: Sampling, index: int, prompt: Prompt) -> SamplingParams:
    """Of the run's request number `index`. An answer that is held to a schema ends where that does."""
    schema = prompt.schema
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed + index,
        ignore_eos=sampling.ignore_eos and schema is None,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
    )


def asked(prompt: Prompt, tokenizer: Tokenizer) -> str | dict[str, list[int]]:
    """The prompt as the engine takes it: through the chat template, where both have to do with chat."""
    if prompt.chat and tokenizer.has_chat_template:
        return {"prompt_token_ids": tokenizer.chat_token_ids(prompt.messages)}
    return prompt.text


def fill(answer: Answer, output: RequestOutput) -> None:
    """What a finished request says of itself."""
    if output.error is not None:
        answer.error = f"{type(output.error).__name__}: {output.error}"
        return
    answer.num_prompt_tokens = len(output.prompt_token_ids)
    answer.num_output_tokens = len(output.outputs[0].token_ids)
    answer.output_hash = hashlib.sha256(repr(output.outputs[0].token_ids).encode()).hexdigest()[:16]
    answer.counts = None if output.metrics is None else output.metrics.counts


def engine_figures(llm: LLM | AsyncLLM) -> dict[str, float]:
    """Totals since the start: passes, seconds by phase, and those of drafting."""
    stats = llm.stats()
    drafting = sum(method.get("draft_s", 0.0) for method in stats["speculation"].values())
    seconds = {f"{phase}_s": value for phase, value in stats["step_seconds"].items()}
    return {"num_passes": stats["num_steps"], **seconds, "draft_s": drafting}
