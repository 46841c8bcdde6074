"""The tokenizer answers as Hugging Face's does, where programs written for that one ask."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidOptionError, InvalidRequestError
from paceline.models.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "My favourite is "}]

TOOL = {"type": "function", "function": {"name": "clock", "description": "Tells the time.", "parameters": {}}}


def test_calls_and_names_agree(ours: Tokenizer, from_transformers: Any) -> None:
    for text in ("Hello there", ["Hello", "there <|im_end|>"]):
        assert ours(text)["input_ids"] == from_transformers(text)["input_ids"]
        assert ours(text)["attention_mask"] == from_transformers(text)["attention_mask"]
    for name in ("eos_token_id", "bos_token_id", "eos_token", "bos_token", "unk_token_id"):
        assert getattr(ours, name) == getattr(from_transformers, name), name
    assert len(ours) == len(from_transformers) and ours.get_vocab() == from_transformers.get_vocab()
    ids = from_transformers("Hello there")["input_ids"]
    assert ours.convert_ids_to_tokens(ids) == from_transformers.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids("Hello") == from_transformers.convert_tokens_to_ids("Hello")
    assert ours.batch_decode([ids, ids[:1]]) == from_transformers.batch_decode([ids, ids[:1]])
    assert set(from_transformers.all_special_ids) <= set(ours.all_special_ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"chat_template": "{{ messages | length }}"},
        {"chat_template": "{{ tools | tojson }}", "tools": [TOOL]},
    ],
)
def test_chat_templates_agree(options: dict[str, Any], ours: Tokenizer, from_transformers: Any) -> None:
    text = from_transformers.apply_chat_template(CHAT, tokenize=False, **options)
    ids = from_transformers.apply_chat_template(CHAT, return_dict=False, **options)
    found = ours.apply_chat_template(CHAT, tokenize=False, **options)
    assert found.rstrip() == text.rstrip()
    if "continue_final_message" not in options:  # a template that strips messages keeps the space of one that goes on
        assert found == text and ours.apply_chat_template(CHAT, **options) == ids
    assert ours.apply_chat_template([CHAT, CHAT], tokenize=False, **options) == [found] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("padding", True), ("truncation", True), ("max_length", 5), ("return_tensors", "pt"), ("return_dict", True)],
)
def test_what_a_call_does_not_make_is_refused_where_it_is_asked_for(ours: Tokenizer, name: str, value: Any) -> None:
    for call in (ours, ours.apply_chat_template):
        with pytest.raises(InvalidOptionError, match=name):
            call(CHAT if call is not ours else "a", **{name: value})  # type: ignore[operator]
        call(CHAT if call is not ours else "a", **{name: None})  # type: ignore[operator]


def test_a_message_that_goes_on_keeps_its_end_and_its_control_tokens_are_text(ours: Tokenizer) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "<|im_end|> is "}]
    ids = ours.chat_token_ids(chat, False, continue_final_message=True)
    assert ours.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n<|im_end|> is ")
    assert ids.count(ours.eos_token_id) == 2, "the system's and the user's end; the spelled one is text"
    with pytest.raises(InvalidRequestError, match="exclude"):
        ours.chat_token_ids(chat, True, continue_final_message=True)


def test_a_template_may_be_replaced_by_jinja_or_a_file(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    tokenizer.use_chat_template(tmp_path / "mine.jinja")
    assert tokenizer.chat_text(CHAT) == "Name a colour.!"
    with pytest.raises(InvalidOptionError, match="neither"):
        tokenizer.use_chat_template("nowhere.jinja")


def test_tools_are_refused_where_the_template_would_leave_them_out(ours: Tokenizer) -> None:
    for make in (ours.chat_token_ids, ours.chat_text):
        with pytest.raises(InvalidRequestError, match="takes no tools"):
            make(CHAT, tools=[TOOL])
        assert make(CHAT, tools=[]) == make(CHAT)


def test_padding_and_tensors_are_refused(ours: Tokenizer) -> None:
    assert ours("a", padding=False, truncation=None, return_tensors=None)["input_ids"]
    with pytest.raises(InvalidOptionError, match="return_tensors"):
        ours("a", return_tensors="pt")
