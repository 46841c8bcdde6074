"""Token ids and chat prompts: SmolLM2 against transformers, GGUF tokenizers against the ones they were written from."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from paceline.errors import InvalidRequestError, ModelLoadError
from paceline.models.tokenizer import Tokenizer
from tests.models.small_gguf import TEXTS, trained

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue? 你好"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_en|> and now?"},  # a real control token: tests/models/test_control_tokens.py
    ],
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_smollm2_encodes_and_decodes_as_transformers(
    text: str, special: bool, ours: Tokenizer, from_transformers: Any
) -> None:
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == from_transformers(text, add_special_tokens=special)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == from_transformers.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_smollm2_agrees_with_transformers_on_any_text(text: str, ours: Tokenizer, from_transformers: Any) -> None:
    ids = ours.encode(text)
    assert ids == from_transformers(text)["input_ids"]
    # Not always the text itself: the vocabulary lacks some bytes.
    assert ours.decode(ids) == from_transformers.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_a_few_tokens_are_decoded_as_the_backend_does(data: st.DataObject, skip: bool, ours: Tokenizer) -> None:
    """Also where they are bytes of no character, special, or not in the vocabulary."""
    some = st.one_of(st.integers(0, 300), st.integers(0, ours.vocab_size + 2))
    ids = data.draw(st.lists(some, max_size=10))
    assert ours.decode(ids, skip_special_tokens=skip) == ours.backend.decode(ids, skip_special_tokens=skip)


def test_smollm2_gguf_is_its_folder(smollm2: Path, ours: Tokenizer) -> None:
    direct = Tokenizer.from_gguf(smollm2 / "source.gguf")
    for text in TEXTS:
        assert direct.encode(text) == ours.encode(text)
    assert direct.chat_text(CHATS[1]) == ours.chat_text(CHATS[1])
    for tokenizer in (direct, ours):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 49152)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_chat_prompts_are_transformers_own(
    messages: list[dict[str, Any]], prompt: bool, ours: Tokenizer, from_transformers: Any
) -> None:
    text = from_transformers.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    ids = from_transformers.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    assert ours.chat_text(messages, prompt) == text
    assert ours.chat_token_ids(messages, prompt) == ids


def test_token_text_keeps_the_space(ours: Tokenizer) -> None:
    ids = ours.encode("Hello world")
    assert [ours.token_text(token) for token in ids] == ["Hello", " world"]
    assert ours.token_text(2) == "<|im_end|>"
    assert ours.token_text(10**6) == ""


# Model folders and chat templates


def folder_with(path: Path, **config: Any) -> Path:
    trained(pre_tokenizers.ByteLevel(add_prefix_space=False)).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_folder_without_or_with_a_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_end_tokens_of_a_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, eos_token={"content": "<|im_end|>"}, bos_token="<|begin|>")
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (1,)
    assert Tokenizer.from_folder(tmp_path).bos_token_id == 0
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (4, 5)


def test_where_a_chat_template_may_be(tmp_path: Path) -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert not Tokenizer.from_folder(folder_with(tmp_path)).has_chat_template
    with pytest.raises(InvalidRequestError, match=r"no chat template.*plain prompt"):
        Tokenizer.from_folder(tmp_path).chat_text(hi)
    folder_with(tmp_path, chat_template=[{"name": "rag", "template": "no"}, {"name": "default", "template": "list"}])
    assert Tokenizer.from_folder(tmp_path).chat_text(hi) == "list"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).chat_text(hi) == "file"
