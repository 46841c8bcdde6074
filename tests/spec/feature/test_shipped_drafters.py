"""The drafters that come with the default model: found by themselves, exact, and accepted."""

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, SamplingParams
from paceline.models.drafters.store import read_header
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import SpeculativeConfig, at_default_size

FOLDER = Path(paceline.__file__).parent / "drafters" / "smollm2-135m"
QUESTIONS = ["What is the capital of Norway?", "A farmer has 12 hens and buys 7 more. How many hens are there now?"]
CHAIN = {"num_speculative_tokens": 4, "node_budget": 4}
CONFIGS: dict[str, tuple[dict[str, Any] | SpeculativeConfig, float]] = {
    # name -> (configuration, tokens per pass that greedy decoding must reach on these two easy answers)
    "eagle3 chain": ({"method": "eagle3", **CHAIN}, 1.8),
    "eagle3 tree": ({"method": "eagle3", "node_budget": 32}, 2.2),
    "eagle3 as it comes": (at_default_size({"method": "eagle3"}), 1.8),
    "medusa": ({"method": "medusa", "node_budget": 32}, 1.3),
    "dflash": ({"method": "dflash", "node_budget": 32}, 1.6),
    "draft": ({"method": "draft_model", "num_speculative_tokens": 4}, 1.8),
    "merge": ({"method": "merge", "members": ["ngram", "suffix", "eagle3"], "node_budget": 24}, 2.2),
}


def answers(
    model: LoadedModel, speculative: dict[str, Any] | SpeculativeConfig | None, temperature: float
) -> tuple[list[list[int]], float]:
    llm = LLM(model, speculative, max_model_len=512, kv_cache_memory_bytes=100 << 20)
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    params = SamplingParams(temperature=temperature, max_tokens=32, seed=5)
    outputs = llm.generate(list(prompts), params)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    tokens, steps = sum(m.num_output_tokens for m in metrics), sum(m.num_steps for m in metrics)
    return [output.outputs[0].token_ids for output in outputs], tokens / steps


@pytest.fixture(scope="module")
def plain(smollm2_float32: LoadedModel) -> dict[float, list[list[int]]]:
    return {t: answers(smollm2_float32, None, t)[0] for t in (0.0, 1.0)}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_in_fewer_passes(
    name: str, smollm2_float32: LoadedModel, plain: dict[float, list[list[int]]]
) -> None:
    speculative, floor = CONFIGS[name]
    greedy, length = answers(smollm2_float32, speculative, 0.0)
    assert greedy == plain[0.0]
    assert length > floor
    sampled, _ = answers(smollm2_float32, speculative, 1.0)
    assert sampled == plain[1.0]


def test_they_are_small_and_have_cards() -> None:
    files = sorted(FOLDER.glob("*.safetensors"))
    assert [file.stem for file in files] == ["dflash", "draft", "eagle3", "medusa"]
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 24 << 20
    for file in files:
        header = read_header(file)
        assert header["method"] == file.stem
        card = file.with_suffix(".md").read_text()
        steps = header["card"]["settings"]["steps"]
        assert f"{steps:,} steps" in card, "the card is about another training than the file"
