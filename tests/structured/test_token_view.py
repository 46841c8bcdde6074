"""llguidance sees the tokens of a SentencePiece vocabulary as the bytes that they stand for."""

from pathlib import Path

import pytest

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.models.tokenizer import Tokenizer
from paceline.structured.compiler import Grammars, token_view
from tests.models.test_gguf_tokenizer import PIECES, WORDS, write_sentencepiece


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    write_sentencepiece(tmp_path / "t.gguf", prefix=prefix)
    tokenizer = Tokenizer.from_gguf(tmp_path / "t.gguf")
    view = token_view(tokenizer, tokenizer.vocab_size)
    seen = [view.tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
    assert seen[len(PIECES) :] == [word.replace("▁", " ").encode() for word in WORDS]
    assert seen[3 : 3 + 255] == [bytes([byte]) for byte in range(255)]  # 255 never stands in a text
    assert {"<s>", "</s>"} <= set(view.special_tokens)


def test_forced_text_has_no_space_before_it_that_the_tokenizer_adds_to_prompts(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "t.gguf")
    tokenizer = Tokenizer.from_gguf(tmp_path / "t.gguf")
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="hello world"))
    request = Request("one", [1], params, max_tokens=50, seed=0, eos_token_ids=(2,))
    grammars.constrain(request)
    assert request.constraint is not None
    forced = request.constraint.forced(50)
    pieces = [tokenizer.token_text(token) for token in forced.token_ids]
    assert pieces == ["he", "ll", "o", " wor", "ld", "</s>"]  # of "hello world": its merges, without the prefix
    grammars.close()
