"""Predicted outputs on the real model: its own answer to a code prompt, edited, comes back as the prediction."""

import itertools
import re

import pytest

from paceline import LLM, SamplingParams

PROMPT = (
    "Write a Python class for a bank account with deposit, withdraw and transfer methods, and a short usage example."
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", {"method": "prediction", "node_budget": 24}, quantization="auto", max_model_len=1024)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    return ask(llm, None)[0]


def ask(llm: LLM, prediction: str | None) -> tuple[str, float, list[int]]:
    """(text, tokens per step, tokens of each step)"""
    speculative = {"off": True} if prediction is None else {"prediction": prediction}
    params = SamplingParams(temperature=0.0, max_tokens=256, speculative=speculative)
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPT}])
    lengths = [0]
    for output in llm.stream(prompt, params):
        lengths.append(len(output.outputs[0].token_ids))
    assert output.metrics is not None and output.error is None
    assert output.metrics.num_output_tokens >= 150, "the answer was meant to be long"
    steps = [after - before for before, after in itertools.pairwise(lengths)]
    return output.outputs[0].text, output.metrics.mean_acceptance_length, steps


def edited(text: str) -> str:
    """A renamed identifier, a deleted line and an inserted line."""
    names = re.findall(r"\b[a-z_]{4,}\b", text)
    name = max(set(names) - {"self", "return"}, key=names.count)
    lines = re.sub(rf"\b{name}\b", "renamed_thing", text).split("\n")
    third = len(lines) // 3
    del lines[third]
    lines.insert(2 * third, "    # an inserted line that the model never writes")
    return "\n".join(lines)


def test_an_edited_prediction_pays(llm: LLM, answer: str) -> None:
    text, tokens_per_step, steps = ask(llm, edited(answer))
    assert text == answer, "a prediction must never change the output"
    assert tokens_per_step >= 6.0
    # It realigns within 3 steps after each edit: runs of steps that emit next to nothing are short.
    run = longest = 0
    for emitted in steps[1:-1]:
        run = run + 1 if emitted <= 2 else 0
        longest = max(longest, run)
    assert longest <= 3, steps


def test_the_unedited_answer_pays_more(llm: LLM, answer: str) -> None:
    text, tokens_per_step, _ = ask(llm, answer)
    assert text == answer and tokens_per_step > 12.0


def test_an_unrelated_prediction_changes_nothing(llm: LLM, answer: str) -> None:
    text, tokens_per_step, _ = ask(llm, "The quick brown fox jumps over the lazy dog. " * 20)
    assert text == answer and tokens_per_step < 1.3
