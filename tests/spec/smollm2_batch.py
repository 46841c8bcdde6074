"""The prompts and settings that drafting methods are tried with on the real model."""

from collections.abc import Sequence
from typing import Any

from paceline import LLM, SamplingParams
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import SpeculativeConfig

MAX_TOKENS = 16
TEXTS = [
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "one two three four one two three four one two",
    "Once upon a time there was a",
    "Q: What is 7 times 8?\nA:",
    "import os\nimport sys\nimport",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born":',
    "xq zv kj wp 83 1 0 ^^",
]


def batch(count: int) -> tuple[list[str], list[SamplingParams]]:
    prompts = [TEXTS[i % 8] + " and so" * (i // 8) for i in range(count)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else (0.7, 1.0)[i // 2 % 2],
            top_k=(0, 50)[i % 4 == 0],
            top_p=(1.0, 0.95)[i % 3 == 0],
            repetition_penalty=(1.0, 1.1)[i % 5 == 0],
            seed=i,
            max_tokens=MAX_TOKENS - i % 5,
        )
        for i in range(count)
    ]
    return prompts, params


def float32_llm(
    model: LoadedModel, speculative: dict[str, Any] | SpeculativeConfig | None = None, **options: Any
) -> LLM:
    defaults: dict[str, Any] = {"kv_cache_memory_bytes": 300 << 20, "max_model_len": 512}
    return LLM(model, speculative or {"method": "none"}, **(defaults | options))


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def as_dict(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "max_tokens")
    return {name: getattr(params, name) for name in names}
