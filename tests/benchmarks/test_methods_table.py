"""The table of benchmarks/methods.py: figures add up, failures are left out, answers that differ are reported."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PLAIN, NGRAM = {"method": "none"}, {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "methods_table.py"
    spec = importlib.util.spec_from_file_location("methods_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(config: dict[str, Any], prompt: str, tokens: list[int], steps: int, seconds: float) -> dict[str, Any]:
    accepted = len(tokens) - steps
    drafts = 0 if config is PLAIN else steps
    return {
        "config": config,
        "prompt": prompt,
        "category": prompt[:1],
        "token_ids": tokens,
        "steps": steps,
        "drafts": drafts,
        "nodes": 2 * drafts,
        "accepted": accepted,
        "accepted_per_position": [accepted] if accepted else [],
        "seconds": seconds,
        "draft_s": 0.001 * drafts,
    }


def test_figures_are_weighed_by_tokens_and_compared_with_plain_decoding(table: ModuleType) -> None:
    records = [
        record(PLAIN, "a1", [1, 2, 3, 4], 4, 4.0),
        record(PLAIN, "b1", [5, 6], 2, 2.0),
        record(NGRAM, "a1", [1, 2, 3, 4], 2, 2.0),
        record(NGRAM, "b1", [5, 6], 1, 1.0),
    ]
    plain, ngram = table.summarize([PLAIN, NGRAM], records)
    assert (plain["mean_acceptance_length"], plain["speedup"]) == (1.0, 1.0)
    assert (ngram["mean_acceptance_length"], ngram["speedup"], ngram["tokens_per_s"]) == (2.0, 2.0, 2.0)
    assert ngram["draft_acceptance_rate"] == 0.5 and ngram["acceptance_per_position"] == [1.0]
    assert ngram["draft_ms_per_step"] == pytest.approx(1.0)
    assert list(ngram["by_category"]) == ["a", "b"]
    assert "ngram K=2" in table.as_text([plain, ngram]) and "| ngram K=2 | 2.00 |" in table.as_markdown([plain, ngram])


def test_failed_and_differing_answers_are_reported(table: ModuleType) -> None:
    failed = {"config": NGRAM, "prompt": "a2", "category": "a", "error": "out of luck"}
    records = [record(PLAIN, "a1", [1, 2], 2, 1.0), record(NGRAM, "a1", [1, 3], 1, 1.0), failed]
    results = table.summarize([PLAIN, NGRAM], records)
    text = table.as_text(results)
    assert "NOT EQUAL: ngram K=2 differs from plain decoding on 1 prompts" in text
    assert "FAILED: ngram K=2, 1 requests" in text and results[1]["tokens"] == 2
