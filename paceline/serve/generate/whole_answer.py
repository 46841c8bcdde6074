"""A call's answer as one JSON body, written when all of it is there."""

import json
from typing import Any

from paceline.core.output_merger import OutputMerger
from paceline.core.outputs import RequestOutput
from paceline.llm.worker import in_worker
from paceline.serve.generate.call import Call
from paceline.serve.generate.deltas import cursors_for
from paceline.serve.generate.figures import prompt_logprobs, speculation, usage
from paceline.serve.generate.formats import choice_bodies, format_for
from paceline.serve.generate.served_engine import ServedEngine


class WholeAnswer:
    def __init__(self, call: Call, backend: ServedEngine) -> None:
        self._call = call
        self._backend = backend
        self._mergers = [OutputMerger() for _ in call.prompts]
        self._num_tokens = 0

    async def take(self, prompt: int, output: RequestOutput) -> None:
        self._mergers[prompt].add(output)
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    async def body(self) -> bytes:
        num_prompt_tokens = sum(map(len, self._call.prompts)) * self._call.params.n
        return await in_worker(self._call.num_entries(self._num_tokens, num_prompt_tokens), self._render)

    def _render(self) -> bytes:
        """As JSON, choice by choice: no single step holds the interpreter for long."""
        call, tokenizer = self._call, self._backend.tokenizer
        shape, cursors = format_for(call, tokenizer), cursors_for(call, self._backend)
        choices = ",".join(
            _json(choice)
            for prompt, merger in enumerate(self._mergers)
            for output in merger.output().outputs
            if (delta := cursors[prompt * call.params.n + output.index].advance(output))
            for choice in choice_bodies(shape, delta, whole=True)
        )
        head = {"id": call.id, "object": shape.object, "created": call.created, "model": call.model}
        rest: dict[str, Any] = {"usage": usage(call, cursors)}
        if call.body.return_speculation:
            rest["speculation"] = speculation(call)
        if call.body.prompt_logprobs is not None:
            rest["prompt_logprobs"] = prompt_logprobs(call, tokenizer)
        return f'{_json(head)[:-1]},"choices":[{choices}],{_json(rest)[1:]}'.encode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
