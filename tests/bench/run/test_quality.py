"""What a format loses: agreement by the decoders that serve, tasks, and the texts for both."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.passages import CALIBRATION, HELD_OUT, SAMPLED, WINDOW, passages
from paceline.bench.run.quality import agreement, check_same_tokens, exact_matches, is_right, load_tasks, logits_of
from paceline.errors import InvalidOptionError
from paceline.llm import LLM
from tests.bench.toy_llm import toy_model

LIMITS: dict[str, Any] = {"num_kv_blocks": 512, "block_size": 4, "max_num_batched_tokens": 64}


def toy(sharpness: float = 3.0) -> LLM:
    return LLM(toy_model(sharpness), {"method": "none"}, **LIMITS)


def prompt_file(folder: Path, count: int = 6) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "abcab" + "defghi"[i], "chat": False}) for i in range(count)))
    return str(path)


def test_passages_are_prompts_with_the_models_own_answers(tmp_path: Path) -> None:
    llm = toy()
    found = passages(llm, prompt_file(tmp_path), 3, seed=1)
    assert len(found) == 3 and passages(toy(), prompt_file(tmp_path), 3, seed=1) == found
    assert passages(toy(), prompt_file(tmp_path), 3, seed=2) != found
    sampled = passages(toy(), prompt_file(tmp_path), 3, seed=1, answers=SAMPLED)
    assert sampled != found and sampled == passages(toy(), prompt_file(tmp_path), 3, seed=1, answers=SAMPLED)
    for passage in found:
        assert 0 < passage.num_prompt_tokens < len(passage.token_ids)


def test_a_plain_text_is_cut_into_windows(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc " * WINDOW)
    found = passages(toy(), str(path), 100)
    assert len(found) > 1 and all(len(one.token_ids) == one.num_prompt_tokens <= WINDOW for one in found)
    path.write_text("")
    with pytest.raises(InvalidOptionError, match="holds no text"):
        passages(toy(), str(path), 1)
    with pytest.raises(InvalidOptionError, match="at least 1 passage"):
        passages(toy(), str(path), 0)


def test_what_is_judged_on_was_not_calibrated_on() -> None:
    assert not set(CALIBRATION.split(",")) & set(HELD_OUT.split(","))


def test_agreement_is_that_of_the_decoders(tmp_path: Path) -> None:
    sharp, blunt = toy(6.0), toy(2.0)
    text = passages(sharp, prompt_file(tmp_path), 4)
    assert logits_of(sharp, text[0]).shape[0] == len(text[0].token_ids)
    same, other = agreement(sharp, sharp, text), agreement(sharp, blunt, text)
    assert (same.divergence, same.same_top) == (0.0, 1.0)
    assert other.divergence > 0.01 and other.perplexity != other.reference_perplexity


def test_models_with_other_vocabularies_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = toy(), toy()
    check_same_tokens(first, second, "second")
    monkeypatch.setattr(second.get_tokenizer(), "vocabulary", lambda: {"other": 0})
    with pytest.raises(InvalidOptionError, match="second has another vocabulary"):
        check_same_tokens(first, second, "second")


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("71", "71", True),
        ("23 + 48 = 71.", "71", True),
        ("It is 1,071.", "1071", True),
        ("71 and not 70", "71", False),
        ("none", "71", False),
        (" Paris\n", "Paris", True),
        ("Paris, France", "Paris", False),
    ],
)
def test_a_number_counts_where_it_is_the_last_and_a_text_where_it_is_all(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right


def test_tasks_come_from_a_file_or_are_sums_and_products(tmp_path: Path) -> None:
    assert load_tasks(None) == load_tasks(None) != load_tasks(None, seed=1)
    for task in load_tasks(None):
        numbers = task.question.removeprefix("What is ").partition("?")[0]
        assert str(eval(numbers)) == task.answer
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n\n{"question": "c", "answer": 4}\n')
    assert [(task.question, task.answer) for task in load_tasks(str(path))] == [("a", "b"), ("c", "4")]
    assert 0 <= exact_matches(toy(), load_tasks(str(path))) <= 1
    for content, message in (("{", "line 1 is not JSON"), ('{"question": 1}', "line 1 must be"), ("", "holds no task")):
        path.write_text(content)
        with pytest.raises(InvalidOptionError, match=message):
            load_tasks(str(path))
    with pytest.raises(InvalidOptionError, match="cannot read the tasks"):
        load_tasks(str(tmp_path / "nothing"))
