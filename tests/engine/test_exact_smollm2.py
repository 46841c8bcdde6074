"""On the real model, in float32: speculation never changes a token: alone, batched, chunked, preempted, any tree."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.models.loader import LoadedModel

MAX_TOKENS = 12
SHAPES: list[Any] = ["chain", [4, 2, 1], [8], [1, 1, 1, 1, 1, 1], "random"]
EVERYDAY = [("chain", 1.0), ([4, 2, 1], 0.5), ([8], 0.0), ([1, 1, 1, 1, 1, 1], 0.5), ("random", 0.5)]
CASES = [
    pytest.param(
        shape, accuracy, id=f"{shape}-{accuracy}", marks=[] if (shape, accuracy) in EVERYDAY else pytest.mark.slow
    )
    for shape in SHAPES
    for accuracy in (0.0, 0.5, 1.0)
]
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "one two three four one two three four one two three",
    "Once upon a time there was a",
    "Q: What is 12 times 12?\nA:",
    "import os\nimport sys\nimport",
    "La plume de ma tante est sur la table. The pen of my",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born":',
]


def batch_of_32() -> tuple[list[str], list[SamplingParams]]:
    """Prompts of different lengths, half of them greedy, half sampled with different seeds and options."""
    prompts = [TEXTS[i % 8] + " x" * (i // 8 * 3) for i in range(32)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else (0.7, 1.0, 1.3)[i % 3],
            top_k=(0, 40)[i % 4 == 0],
            top_p=(1.0, 0.9)[i % 6 == 0],
            seed=i,
            max_tokens=MAX_TOKENS - i % 5,
            ignore_eos=i % 3 == 0,
        )
        for i in range(32)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def make(smollm2_float32: LoadedModel) -> Callable[..., LLM]:
    def build(speculative: dict[str, Any] | None = None, **options: Any) -> LLM:
        defaults: dict[str, Any] = {"kv_cache_memory_bytes": 400 << 20, "max_model_len": 1024}
        return LLM(smollm2_float32, speculative, **(defaults | options))

    return build


@pytest.fixture(scope="module")
def truth(make: Callable[..., LLM]) -> list[list[int]]:
    """Every request by itself, plainly."""
    llm = make(enable_prefix_caching=False)
    prompts, params = batch_of_32()
    return [tokens_of(llm.generate(p, s))[0] for p, s in zip(prompts, params, strict=True)]


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def oracle(llm_truth: list[list[int]], make: Callable[..., LLM], accuracy: float, shape: Any) -> dict[str, Any]:
    prompts, _ = batch_of_32()
    encode = make().get_tokenizer().encode
    sequences = [encode(p) + out for p, out in zip(prompts, llm_truth, strict=True)]
    return {
        "method": "oracle",
        "sequences": sequences,
        "accuracy": accuracy,
        "shape": shape,
        "num_speculative_tokens": 6,
        "node_budget": 8,
    }


def test_the_float32_path_is_batch_invariant(smollm2_float32: LoadedModel) -> None:
    assert smollm2_float32.decoder.batch_invariant


def test_batching_alone_changes_nothing(make: Callable[..., LLM], truth: list[list[int]]) -> None:
    assert tokens_of(make().generate(*batch_of_32())) == truth


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 64}], ids=["whole", "chunked"])
def test_ngram_changes_nothing(make: Callable[..., LLM], truth: list[list[int]], options: dict[str, Any]) -> None:
    llm = make({"method": "ngram", "num_speculative_tokens": 4}, **options)
    outputs = llm.generate(*batch_of_32())
    assert tokens_of(outputs) == truth
    assert sum(o.metrics.num_accepted_tokens for o in outputs if o.metrics) > 0


@pytest.mark.parametrize(("shape", "accuracy"), CASES)
def test_oracle_trees_change_nothing(
    make: Callable[..., LLM], truth: list[list[int]], shape: Any, accuracy: float
) -> None:
    llm = make(oracle(truth, make, accuracy, shape), max_num_batched_tokens=320)
    assert tokens_of(llm.generate(*batch_of_32())) == truth


@pytest.mark.parametrize("which", range(0, 32, 9))
def test_oracle_trees_change_nothing_alone(make: Callable[..., LLM], truth: list[list[int]], which: int) -> None:
    prompts, params = batch_of_32()
    llm = make(oracle(truth, make, 0.6, "random"))
    assert tokens_of(llm.generate(prompts[which], params[which]))[0] == truth[which]


@pytest.mark.parametrize("method", ["ngram", "oracle"])
def test_forced_preemption_changes_nothing(make: Callable[..., LLM], truth: list[list[int]], method: str) -> None:
    speculative = oracle(truth, make, 0.6, [3, 2, 1]) if method == "oracle" else {"method": "ngram", "node_budget": 4}
    small = {"block_size": 4, "num_kv_blocks": 40, "kv_cache_memory_bytes": None, "max_model_len": 160}
    llm = make(speculative, **small)
    preempted = 0
    preempt = llm.engine.core.scheduler._preempt

    def count(*args: Any) -> None:
        nonlocal preempted
        preempted += 1
        preempt(*args)

    llm.engine.core.scheduler._preempt = count  # type: ignore[method-assign]
    assert tokens_of(llm.generate(*batch_of_32())) == truth
    assert preempted > 0, "the pool was meant to be too small for 32 requests"
