"""What the client of a choice is told next.

The engine gives what is new of a choice; a cursor per choice adds what the client needs beside it: how far the choice
has come, and each token's share of the text. A whole answer is told as one delta.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.incremental_text import IncrementalText
from paceline.core.outputs import CompletionOutput, TokenLogprobs
from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.call import Call
from paceline.serve.generate.reasoning import ReasoningSplitter, splitter_for
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.http.request_bodies import ChatCompletionRequest

DRAFT = "draft"  # the engine's word for a node of a tree that has one drafter


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token for the playground: its share of the text, and where it came from (CompletionOutput.token_sources)."""

    id: int
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    first: bool
    text: str
    num_new_tokens: int
    text_offset: int  # characters of this choice before this delta
    logprobs: list[TokenLogprobs] | None
    pieces: list[TokenPiece] | None
    finish_reason: str | None
    stop_reason: str | int | None
    reasoning: str | None = None  # what was thought before `text`; None: that is not looked for


class Cursor:
    """How much of one choice was already told. `method`, where sources are wanted: the drafting method."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        method: str | None = None,
        splitter: ReasoningSplitter | None = None,
        shows_reasoning: bool = True,
    ) -> None:
        self.num_tokens = 0
        self.first = True  # nothing was told
        self._index = index
        self._num_chars = 0
        self._num_untold_tokens = 0  # that came without text
        self._method = method
        self._text = IncrementalText(tokenizer)
        self._splitter = splitter
        self._shows_reasoning = shows_reasoning

    def advance(self, new: CompletionOutput) -> Delta | None:
        """What to tell of what is new, or None where that is nothing yet."""
        pieces = None if self._method is None else self._pieces(new.token_ids, new.token_sources, self._method)
        tells_tokens = new.token_logprobs is not None or pieces is not None
        self._num_untold_tokens += len(new.token_ids)
        text, reasoning = new.text, None
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text, last=new.finish_reason is not None)
            reasoning = reasoning if self._shows_reasoning else ""
        if not text and not reasoning and not (new.token_ids and tells_tokens) and new.finish_reason is None:
            return None
        delta = Delta(
            self._index, self.first, text, self._num_untold_tokens, self._num_chars, new.token_logprobs, pieces,
            new.finish_reason, new.stop_reason, reasoning,
        )  # fmt: skip
        self.first = False
        self.num_tokens += self._num_untold_tokens
        self._num_untold_tokens = 0
        self._num_chars += len(text)
        return delta

    def _pieces(self, token_ids: Sequence[int], sources: Sequence[str], method: str) -> list[TokenPiece]:
        return [
            TokenPiece(token, self._text.append(token), method if source == DRAFT else source)
            for token, source in zip(token_ids, sources, strict=True)
        ]


def cursors_for(call: Call, backend: ServedEngine) -> list[Cursor]:
    """One per choice."""
    method = backend.method_of(call.params) if call.body.return_token_sources else None
    if call.reasoning_parser is None:
        return [Cursor(i, backend.tokenizer, method) for i in range(call.num_choices)]
    assert isinstance(call.body, ChatCompletionRequest)
    shown = call.body.include_reasoning is not False
    return [
        Cursor(i, backend.tokenizer, method, splitter_for(call, prompt, backend.tokenizer), shown)
        for i, prompt in enumerate(prompt for prompt in call.prompts for _ in range(call.params.n))
    ]
