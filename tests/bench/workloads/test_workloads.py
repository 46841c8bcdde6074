"""Prompts: enough of them, all different, and files that say where they are wrong."""

import json
from pathlib import Path

import jsonschema
import pytest
from jsonschema import Draft202012Validator

from paceline.bench.workloads.workload import AGENT_CATEGORIES, CATEGORIES, load_workload, take
from paceline.errors import InvalidOptionError


@pytest.mark.parametrize("category", CATEGORIES)
def test_shipped_prompts_are_many_and_distinct(category: str) -> None:
    prompts = load_workload(category)
    assert len(prompts) >= 32
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert all(prompt.category == category and "{" + "}" not in prompt.text for prompt in prompts)


@pytest.mark.parametrize("category", AGENT_CATEGORIES)
def test_prompts_of_agents_come_with_a_schema_and_each_asks_something_else(category: str) -> None:
    prompts = load_workload(category)
    assert len(prompts) >= 32
    assert len({(prompt.history, prompt.text) for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.schema is not None and prompt.category == category
        Draft202012Validator.check_schema(json.loads(prompt.schema))
    assert {prompt.category for prompt in take("agents", 2)} == set(AGENT_CATEGORIES)


def test_the_calls_in_a_loops_history_are_of_the_schema_and_a_turn_goes_on_with_the_one_before() -> None:
    for first, second, third in zip(*[iter(load_workload("tool_loop"))] * 3, strict=True):
        for turn, after in ((first, second), (second, third)):
            assert after.history[: len(turn.history) + 1] == (*turn.history, ("user", turn.text))
        called = [text for role, text in third.history if role == "assistant"]
        assert len(called) == 2
        for text in called:
            jsonschema.validate(json.loads(text), json.loads(str(third.schema)))


def test_the_order_is_fixed_and_mixed_workloads_take_turns() -> None:
    assert [p.prompt_id for p in take("chat", 3)] == [p.prompt_id for p in take("chat", 3)]
    assert [p.category for p in take("all", len(CATEGORIES))] == list(CATEGORIES)
    assert [p.category for p in take("code, maths", 4)] == ["code", "maths", "code", "maths"]


def test_taking_more_prompts_than_there_are_starts_again_at_the_first() -> None:
    count = len(load_workload("summary"))
    assert take("summary", count + 2)[-1] == load_workload("summary")[1]


FILES = {
    "spec_bench": ('{"question_id": 7, "category": "writing", "turns": ["Say hi.", "Again."]}\n', "7", "writing", True),
    "humaneval": (
        '{"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}\n',
        "HumanEval/0",
        "code",
        False,
    ),
    "sharegpt": (
        json.dumps(
            [{"id": "a", "conversations": [{"from": "system", "value": "x"}, {"from": "human", "value": "Hi"}]}]
        ),
        "a",
        "chat",
        True,
    ),
    "plain": ('{"prompt": "Hello", "id": "p1", "category": "greeting", "chat": false}\n', "p1", "greeting", False),
}


@pytest.mark.parametrize("form", FILES)
def test_prompt_files_of_every_known_form_are_read(form: str, tmp_path: Path) -> None:
    text, prompt_id, category, chat = FILES[form]
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    (prompt,) = load_workload(str(path))
    assert (prompt.prompt_id, prompt.category, prompt.chat) == (prompt_id, category, chat)
    assert prompt.text in ("Say hi.", "def f():", "Hi", "Hello")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ('{"question": "a"}\n', r"line 1 has the keys \['question'\]"),
        ('{"prompt": "a"}\n\n{"prompt": " "}\n', "line 3 has no prompt text"),
        ('{"turns": []}\n', "line 1 has no prompt text"),
        ('"just text"\n', "line 1 must be a JSON object"),
        ("[1, 2", "begins like a JSON list"),
        ("", "holds no prompt"),
    ],
)
def test_a_malformed_file_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidOptionError, match=message):
        load_workload(str(path))


def test_an_unknown_workload_names_the_known_ones() -> None:
    with pytest.raises(InvalidOptionError, match=r"unknown workload 'chatt'.*repetitive"):
        load_workload("chatt")
