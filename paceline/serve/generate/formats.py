"""OpenAI's two answer shapes. A whole answer and a stream's chunks are made from the same deltas.

chat         {"message": {...}} / {"delta": {...}},  logprobs {"content": [...]}
completions  {"text": ...},                          logprobs {"tokens": [...], "token_logprobs": [...], ...}
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from paceline.core.outputs import TokenLogprobs
from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.call import Call
from paceline.serve.generate.deltas import Delta
from paceline.serve.http.request_bodies import CompletionRequest

LOWEST_LOGPROB = -9999.0  # what OpenAI sends for "impossible": JSON has no infinity


class Format(Protocol):
    object: str
    chunk_object: str

    def choices(self, delta: Delta, *, whole: bool) -> list[dict[str, Any]]: ...  # more than one only in a stream


def format_for(call: Call, tokenizer: Tokenizer) -> Format:
    if isinstance(call.body, CompletionRequest):
        return CompletionFormat(tokenizer, call)
    if call.plan is None:
        return ChatFormat(tokenizer)
    from paceline.serve.generate.chat_tools import ChatToolsFormat  # which is made of this file's ChatFormat

    return ChatToolsFormat(tokenizer, call.plan)


def choice_bodies(shape: Format, delta: Delta, *, whole: bool) -> list[dict[str, Any]]:
    choices = shape.choices(delta, whole=whole)
    if delta.pieces is not None:
        choices[0]["token_sources"] = [asdict(piece) for piece in delta.pieces]
    return choices


class ChatFormat:
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choices(self, delta: Delta, *, whole: bool) -> list[dict[str, Any]]:
        return [self.choice(delta, whole=whole)]

    def choice(self, delta: Delta, *, whole: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text}
        if delta.first or whole:
            content = {"role": "assistant", **content}
        if whole:
            content["refusal"] = None
        logprobs = None
        if delta.logprobs is not None:
            logprobs = {"content": [self._logprob(entry) for entry in delta.logprobs], "refusal": None}
        return {
            "index": delta.index,
            "message" if whole else "delta": content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _logprob(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top.items()]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        # Half a character has no text of its own; null says so.
        data = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": data}


class CompletionFormat:
    object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, call: Call) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._echoed: dict[int, str] = {}  # by prompt, once a choice of it begins

    def choices(self, delta: Delta, *, whole: bool) -> list[dict[str, Any]]:
        text, offset = delta.text, delta.text_offset
        logprobs: list[TokenLogprobs | None] | None = None if delta.logprobs is None else list(delta.logprobs)
        if self._call.echoes:
            prompt = delta.index // self._call.params.n
            echoed = self._echo(prompt)
            if delta.first:
                text = echoed + text
                logprobs = None if logprobs is None else [*self._call.prompt_logprobs[prompt], *logprobs]
            else:
                offset += len(echoed)
        return [
            {
                "index": delta.index,
                "text": text,
                "logprobs": None if logprobs is None else self._logprobs(logprobs, offset, delta.index),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
        ]

    def _echo(self, prompt: int) -> str:
        if prompt not in self._echoed:
            self._echoed[prompt] = self._tokenizer.decode(self._call.prompts[prompt])
        return self._echoed[prompt]

    def _logprobs(self, entries: Sequence[TokenLogprobs | None], offset: int, index: int) -> dict[str, Any]:
        body: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            first = self._call.prompts[index // self._call.params.n][0]  # the one token that has no probability
            text = self._tokenizer.token_text(first if entry is None else entry.token_id)
            top = None if entry is None else self._top(entry)
            body["tokens"].append(text)
            body["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            body["top_logprobs"].append(top)
            body["text_offset"].append(offset)
            offset += len(text)
        return body

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in entry.top.items()}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
