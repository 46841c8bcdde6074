"""Every method on the real model, float32: the same tokens as plain decoding, greedy and seeded.

Alone, in a batch of 32, methods mixed in one batch, under preemption, after prefix-cache hits, and when requests are
cancelled in mid-draft."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.models.loader import LoadedModel
from paceline.spec.methods import PROPOSERS

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
HOST_METHODS = ["ngram", "suffix", "recycling", "lookahead", "merge"]
MODEL_METHODS = ["draft_model", "layer_skip"]


def config(method: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"num_draft_layers": 29} if method == "draft_model" else {}
    if method == "layer_skip":
        extra["draft_layers"] = [layer for layer in range(30) if layer not in (6, 11, 16)]
    if method in ("recycling", "merge"):
        extra["node_budget"] = 12  # small trees: the float32 path is slow
    if method == "lookahead":
        extra = {"window_size": 4, "ngram_size": 3, "guess_set_size": 3}
    return {"method": method, **extra}


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


@pytest.fixture(scope="module")
def make(smollm2_float32: LoadedModel) -> Callable[..., LLM]:
    def build(speculative: dict[str, Any] | None = None, **options: Any) -> LLM:
        defaults: dict[str, Any] = {"kv_cache_memory_bytes": 300 << 20, "max_model_len": 512}
        return LLM(smollm2_float32, speculative or {"method": "none"}, **(defaults | options))

    return build


@pytest.fixture(scope="module")
def truth(make: Callable[..., LLM]) -> list[list[int]]:
    return tokens_of(make(enable_prefix_caching=False).generate(*batch(32)))


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("method", HOST_METHODS + MODEL_METHODS)
def test_a_few_together(make: Callable[..., LLM], truth: list[list[int]], method: str) -> None:
    prompts, params = batch(8)
    llm = make(config(method))
    outputs = llm.generate(prompts, params)
    assert tokens_of(outputs) == truth[:8]
    stats = llm.stats()["speculation"][method]
    assert stats["num_accepted_tokens"] > 0, "nothing was ever accepted: this proves nothing"


def test_methods_mixed_in_one_batch_of_32(make: Callable[..., LLM], truth: list[list[int]]) -> None:
    prompts, params = batch(32)
    choices: list[dict[str, Any] | None] = [None, {"off": True}, {"num_speculative_tokens": 2}, {"node_budget": 6}]
    choices += [{"method": m} for m in ("ngram", "suffix", "lookahead") if PROPOSERS[m].per_request]
    choices += [{"prediction": "four one two three four"}]
    mixed = [SamplingParams(**{**as_dict(p), "speculative": choices[i % len(choices)]}) for i, p in enumerate(params)]
    llm = make(config("merge"), max_num_batched_tokens=256)
    assert tokens_of(llm.generate(prompts, mixed)) == truth
    used = llm.stats()["speculation"]
    assert {"merge", "ngram", "suffix", "lookahead", "prediction", "none"} <= set(used)


def as_dict(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "max_tokens")
    return {name: getattr(params, name) for name in names}


def test_preempted_chunked_and_cached(make: Callable[..., LLM], truth: list[list[int]]) -> None:
    prompts, params = batch(8)
    for method in ("merge", "layer_skip"):
        llm = make(
            config(method), num_kv_blocks=24, kv_cache_memory_bytes=None, max_model_len=256, max_num_batched_tokens=64
        )
        assert tokens_of(llm.generate(prompts, params)) == truth[:8]
        assert tokens_of(llm.generate(prompts, params)) == truth[:8]  # prompts now come from the prefix cache


@pytest.mark.parametrize("method", ["merge", "draft_model"])
def test_cancelled_in_mid_draft(make: Callable[..., LLM], truth: list[list[int]], method: str) -> None:
    prompts, params = batch(8)
    llm = make(config(method))
    for i, _ in enumerate(llm.stream(prompts[2], params[2])):
        if i == 3:
            break  # leaving the stream aborts the request
    core = llm.engine.core
    core.check_integrity()
    assert not core.has_requests and core.kv.usage == 0.0
    assert tokens_of(llm.generate(prompts[:3], params[:3])) == truth[:3]


def test_a_draft_model_that_is_the_target_is_always_right(
    make: Callable[..., LLM], smollm2_float32: LoadedModel
) -> None:
    """Greedy, and sampled with the target's own noise: only the end of a request leaves drafts unused."""
    prompts, params = batch(4)
    llm = make({"method": "draft_model", "model": smollm2_float32, "num_speculative_tokens": 3})
    llm.generate(prompts, [SamplingParams(**{**as_dict(p), "max_tokens": 13}) for p in params])
    stats = llm.stats()["speculation"]["draft_model"]
    assert stats["accepted_per_position"][0] >= 0.95 * stats["num_drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("method", HOST_METHODS + MODEL_METHODS)
def test_batch_of_32(make: Callable[..., LLM], truth: list[list[int]], method: str) -> None:
    llm = make(config(method), max_num_batched_tokens=256)
    assert tokens_of(llm.generate(*batch(32))) == truth


@pytest.mark.slow
@pytest.mark.parametrize("method", HOST_METHODS + MODEL_METHODS)
def test_each_alone(make: Callable[..., LLM], truth: list[list[int]], method: str) -> None:
    llm = make(config(method))
    prompts, params = batch(16)
    for i in range(16):
        assert tokens_of(llm.generate(prompts[i], params[i]))[0] == truth[i]
