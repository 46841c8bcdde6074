"""A vocabulary small enough to enumerate, in which texts can be spelled in several ways."""

import functools
from collections.abc import Sequence
from typing import Any

import tokenizers

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.structured.compiler import Grammars

A, B, AB, END = range(4)
TEXTS = {"a": A, "b": B, "ab": AB, "<end>": END}
VOCAB = len(TEXTS)

REGEXES = ("a(b|a)*", "(ab)+a?", "ab|aa|b", "(a|b){2}", "a{1,3}b", "(ab|b)*", "a", "b(ab){0,2}")


class SmallTokenizer:
    eos_token_ids = (END,)
    vocab_size = VOCAB
    has_chat_template = False

    def vocabulary(self) -> dict[str, int]:
        return dict(TEXTS)

    def definition(self) -> str:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(dict(TEXTS), [("a", "b")]))
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<end>"])
        return str(made.to_str())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        texts = {token: text for text, token in TEXTS.items()} | {END: ""}
        return "".join(texts[token] for token in token_ids)


@functools.cache
def grammars() -> Grammars:
    return Grammars(SmallTokenizer(), VOCAB)  # type: ignore[arg-type]


def constrained(regex: str, output: Sequence[int] = (), **params: Any) -> Request:
    return _constrained(StructuredOutputsParams(regex=regex), output, **params)


def constrained_by(grammar: str, output: Sequence[int] = ()) -> Request:
    return _constrained(StructuredOutputsParams(grammar=grammar), output)


def _constrained(wanted: StructuredOutputsParams, output: Sequence[int], **params: Any) -> Request:
    options = SamplingParams(max_tokens=64, stop_token_ids=[END], structured_outputs=wanted, **params)
    request = Request("small", [A, B], options, max_tokens=64, seed=0, eos_token_ids=(END,))
    request.token_ids += output
    grammars().constrain(request)
    return request
