"""Drafts by layers of the target itself, on the real model: nearly all of its layers, and then the model itself."""

from typing import Any

import pytest

from paceline import SamplingParams
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import at_default_size
from tests.spec.smollm2_batch import as_dict, batch, float32_llm, tokens_of


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "num_draft_layers": 29},
        {"method": "layer_skip", "draft_layers": [layer for layer in range(30) if layer not in (6, 11, 16)]},
    ],
    ids=lambda config: config["method"],
)
def test_chosen_layers_draft_what_the_target_accepts(smollm2_float32: LoadedModel, config: dict[str, Any]) -> None:
    prompts, params = batch(8)
    llm = float32_llm(smollm2_float32, at_default_size(config))
    outputs = llm.generate(prompts, params)
    assert tokens_of(outputs) == tokens_of(float32_llm(smollm2_float32).generate(prompts, params))
    assert llm.stats()["speculation"][config["method"]]["num_accepted_tokens"] > 0


def test_a_draft_model_that_is_the_target_is_always_right(smollm2_float32: LoadedModel) -> None:
    """Greedy, and sampled with the target's own noise: only the end of a request leaves drafts unused."""
    prompts, params = batch(4)
    config = {"method": "draft_model", "model": smollm2_float32, "num_speculative_tokens": 3}
    llm = float32_llm(smollm2_float32, config)
    llm.generate(prompts, [SamplingParams(**{**as_dict(p), "max_tokens": 13}) for p in params])
    stats = llm.stats()["speculation"]["draft_model"]
    assert stats["accepted_per_position"][0] >= 0.95 * stats["num_drafts"]
