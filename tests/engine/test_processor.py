"""From a call to its requests: everything is checked and prepared once, before the engine sees it."""

from typing import Any

import pytest

from paceline import SamplingParams
from paceline.engine.processor import Processor
from paceline.errors import InvalidOptionError, InvalidRequestError
from tests.toy import EOS, VOCAB, ToyTokenizer


class CountingTokenizer(ToyTokenizer):
    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        if "?" in text:
            raise UnicodeError("no text")
        return super().encode(text.replace(" ", ""), add_special_tokens)


def processor(tokenizer: ToyTokenizer | None = None) -> Processor:
    return Processor(tokenizer or CountingTokenizer(), VOCAB, (EOS,), 64, lambda params: None)


def test_bad_words_and_stop_strings_are_prepared_once_for_all_samples_and_prompts() -> None:
    tokenizer = CountingTokenizer()
    params = SamplingParams(n=32, bad_words=["ab", "c"], stop=["d"], stop_token_ids=[3])
    own = processor(tokenizer)
    requests = [request for prompt in ([1], [2]) for request in own.job("call", prompt, params).requests]
    assert len(requests) == 64 and tokenizer.num_encoded == 4  # each word at the start of a text and after a space
    for name in ("bad_words", "stop_strings", "stop_token_ids"):
        assert len({id(getattr(request, name)) for request in requests}) == 1
    assert requests[0].stop_token_ids == {3, EOS}
    assert requests[0].bad_words.always_banned == {2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [0, 1], "bad_words": ["a", "b"]}, "nothing could be sampled"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "holds only stop tokens"),
        ({"bad_words": [chr(ord("a") + token) for token in range(VOCAB)]}, "nothing could be sampled"),
        ({"bad_words": ["?"]}, "bad_words .* cannot be tokenized"),
        ({"logit_bias": {10**5000: 1.0}}, "logit_bias names token"),
    ],
)
def test_options_that_cannot_work_with_this_model_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        processor().job("call", [1], SamplingParams(**options))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("what?", "cannot be tokenized"),
        ("z", "does not have"),
        (b"ab", "text, or a list of token ids"),
        (5, "text, or a list of token ids"),
        ([1.0], "got 1.0"),
        ([10**5000], "whole numbers from 0 to 23"),
        ([10**5000] * 64, "leaves no room"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        processor().job("call", prompt, SamplingParams())


def test_a_bad_word_that_the_model_has_no_token_for_is_ignored() -> None:
    (request,) = processor().job("call", "ab", SamplingParams(bad_words=["~"])).requests
    assert not request.bad_words
