"""Tokenizers inside GGUF files: byte-level ones by their named cuts, SentencePiece ones by their scores."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from paceline.errors import UnsupportedModelError
from paceline.models.gguf_file import GgufFile
from paceline.models.gguf_tokenizer import CUTS, build_tokenizer
from paceline.models.tokenizer import Tokenizer
from tests.models.small_gguf import CORPUS, finish, trained, write_byte_level

# What each model's own tokenizer.json does before BPE, written down independently of the table under test.
EXPECTED_CUTS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.Split(
        Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
    ),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
            ),
        ]
    ),
}


@pytest.mark.parametrize("pre", EXPECTED_CUTS)
@pytest.mark.parametrize("text", CORPUS[: len(CORPUS) // 3])
def test_named_cuts(pre: str, text: str, tmp_path: Path) -> None:
    original = trained(EXPECTED_CUTS[pre])
    write_byte_level(tmp_path / "t.gguf", original, pre)
    rebuilt = build_tokenizer(GgufFile(tmp_path / "t.gguf"))
    assert rebuilt.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "gpt-2"])
def test_gguf_tokenizers_are_transformers_own(pre: str, tmp_path: Path) -> None:
    """transformers has a reader of its own for GGUF tokenizers."""
    import transformers

    write_byte_level(tmp_path / "t.gguf", trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), pre)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    rebuilt = build_tokenizer(GgufFile(tmp_path / "t.gguf"))
    for text in CORPUS[: len(CORPUS) // 3]:
        assert rebuilt.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def test_qwen2_tokenizer_is_transformers_own(tmp_path: Path) -> None:
    import transformers

    original = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    write_byte_level(tmp_path / "t.gguf", original, "qwen2")
    model = json.loads(original.to_str())["model"]
    theirs = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    rebuilt = build_tokenizer(GgufFile(tmp_path / "t.gguf"))
    for text in CORPUS[: len(CORPUS) // 3]:
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if "<|im_end|>" not in text:  # not a special token there
            assert rebuilt.encode(text).ids == expected


def test_the_begin_token_is_added_where_file_or_family_say_so(tmp_path: Path) -> None:
    original = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    for pre, fields, begins in (
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ):
        path = tmp_path / "t.gguf"
        write_byte_level(path, original, pre, **fields)
        tokenizer = Tokenizer.from_gguf(path)
        assert (tokenizer.encode("cat")[0] == tokenizer.bos_token_id == 0) == begins
        assert tokenizer.encode("cat", add_special_tokens=False)[0] != 0


def test_an_unknown_cut_or_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    write_byte_level(path, trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), "jais-2")
    with pytest.raises(UnsupportedModelError, match=f"'jais-2'.*Known: {', '.join(CUTS)}"):
        Tokenizer.from_gguf(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a", "b"])
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*Known: gpt2, llama"):
        Tokenizer.from_gguf(path)


# SentencePiece

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "lo",
    "hel",
    "ello",
    "▁h",
    "▁w",
    "or",
    "ld",
    "▁hello",
    "▁wor",
]


def write_sentencepiece(path: Path, *, prefix: bool = True) -> dict[str, float]:
    """Words later in the list score lower, as SentencePiece numbers its merges; returns piece -> score."""
    tokens = PIECES + WORDS
    scores = [0.0] * len(PIECES) + [-float(i) for i in range(len(WORDS))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(WORDS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    finish(writer)
    return dict(zip(WORDS, scores[len(PIECES) :], strict=True))


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The algorithm from its definition: merge the adjacent pair whose joined piece scores best, until none exists."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [
        piece for part in parts for piece in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="helo wrdxé", max_size=14))
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    scores = write_sentencepiece(path)
    tokenizer = Tokenizer.from_gguf(path)
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    expected = sentencepiece(text, scores) if text else []
    assert [tokenizer.backend.id_to_token(token) for token in ids[1:]] == expected
    assert tokenizer.decode(ids) == text


def test_sentencepiece_token_text_and_prefix(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "t.gguf")
    tokenizer = Tokenizer.from_gguf(tmp_path / "t.gguf")
    assert [tokenizer.token_text(token) for token in tokenizer.encode("hello world")[1:]] == [
        " ",
        "he",
        "ll",
        "o",
        " wor",
        "ld",
    ]
    write_sentencepiece(tmp_path / "t.gguf", prefix=False)
    bare = Tokenizer.from_gguf(tmp_path / "t.gguf")
    assert bare.token_text(bare.encode("hello")[1]) == "he"
    assert bare.decode(bare.encode(" hello")) == " hello"
