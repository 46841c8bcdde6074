"""Seeded equality on the real model, in float32: plain decoding against oracle trees, under every kind of option."""

import itertools
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.models.loader import LoadedModel

TEMPERATURES = (0.7, 1.0, 1.3)
OPTIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "bias": {"logit_bias": {28: 3.0, 30: -6.0, 260: 1.5}, "bad_words": ["the"]},
}
SHAPES: list[Any] = [[4, 2, 1], "random"]
SUBJECTS = ["The river", "A compiler", "My grandmother", "Prime numbers", "The city of Rome", "Coffee", "Electricity"]
STARTS = ["is known for", "was once", "can be described as", "never", "and the reason why"]


def prompts(count: int) -> list[str]:
    """Different texts of different lengths, as many as wanted."""
    pairs = itertools.product(range(1, count + 1), STARTS, SUBJECTS)
    return [f"{' '.join(['Well,'] * (n % 5))} {subject} {start}" for n, start, subject in pairs][:count]


def check(model: LoadedModel, num_prompts: int, shape: Any, max_tokens: int = 10) -> None:
    cases = list(itertools.product(prompts(num_prompts), TEMPERATURES, OPTIONS.values()))
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens, **options)
        for i, (_, temperature, options) in enumerate(cases)
    ]
    texts = [text for text, _, _ in cases]
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 400 << 20, "max_model_len": 128}
    plain = LLM(model, {"method": "none"}, **sizes).generate(texts, params)
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in plain]
    oracle = {"method": "oracle", "sequences": sequences, "accuracy": 0.7, "shape": shape, "num_speculative_tokens": 5}
    found = LLM(model, oracle | {"node_budget": 12}, **sizes).generate(texts, params)
    differing = [
        i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a.outputs[0].token_ids != b.outputs[0].token_ids
    ]
    assert differing == [], f"{len(differing)} of {len(cases)} outputs differ"
    accepted = sum(output.metrics.num_accepted_tokens for output in found if output.metrics)
    assert accepted > len(cases) // 2, "the trees were meant to be right often enough to matter"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_seeded_output_is_equal(smollm2_float32: LoadedModel, shape: Any) -> None:
    check(smollm2_float32, 2, shape, max_tokens=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_seeded_output_is_equal_over_200_prompts(smollm2_float32: LoadedModel, shape: Any) -> None:
    check(smollm2_float32, 200, shape)
