"""From a request body to what the engine takes: prompts as token ids, and `SamplingParams`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.core.sampling_params import SamplingParams
from paceline.serve.backend import Backend
from paceline.serve.config import ServerConfig
from paceline.serve.errors import ApiError
from paceline.serve.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest, Message, as_text

INLINE_CHARS = 2_000  # longer texts are tokenized in a thread: the event loop has streams to feed

# Same name and meaning in the body and in SamplingParams; left out means SamplingParams' own default.
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "bad_words", "allowed_token_ids", "seed", "n", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


async def sampling_params(
    body: GenerationRequest, prompt_lens: list[int], backend: Backend, config: ServerConfig
) -> SamplingParams:
    """One set of options for all prompts of a call, `max_tokens` resolved."""
    options = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    return SamplingParams(
        **options,
        max_tokens=_max_tokens(body, max(prompt_lens), backend, config),
        logprobs=_logprobs(body),
        logit_bias=_logit_bias(body.logit_bias),
        speculative=await _speculative(body, backend),
    )


def _max_tokens(body: GenerationRequest, prompt_len: int, backend: Backend, config: ServerConfig) -> int:
    room = backend.max_model_len - prompt_len
    limit = config.max_tokens_limit
    asked = body.max_tokens
    if isinstance(body, ChatCompletionRequest):
        asked = body.max_completion_tokens or asked
    if asked is None:
        default = 16 if isinstance(body, CompletionRequest) else room  # OpenAI's defaults
        return max(1, min(default, room, limit or room))
    if limit is not None and asked > limit:
        raise ApiError(400, f"max_tokens {asked} is above this server's limit of {limit}", param="max_tokens")
    if asked > room:
        raise ApiError(
            400,
            f"the prompt has {prompt_len} tokens and max_tokens is {asked}, together more than the context of "
            f"{backend.max_model_len}: shorten the prompt or ask for at most {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return asked


def _logprobs(body: GenerationRequest) -> int | None:
    if isinstance(body, ChatCompletionRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionRequest)
    return body.logprobs


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in (given or {}).items():
        if not token.isascii() or not token.isdigit():
            raise ApiError(400, f"logit_bias maps token ids to numbers, got the key {token!r}", param="logit_bias")
        bias[int(token)] = value
    return bias


async def _speculative(body: GenerationRequest, backend: Backend) -> dict[str, Any] | None:
    if body.prediction is None:
        return body.speculative
    if "prediction" in (body.speculative or {}):
        raise ApiError(400, "prediction is given twice, by itself and in speculative: give one", param="prediction")
    tokens = await tokenize_text(as_text(body.prediction.content), backend, add_special_tokens=False)
    return {**(body.speculative or {}), "prediction": tokens}


async def prompt_token_ids(body: GenerationRequest, backend: Backend, config: ServerConfig) -> list[list[int]]:
    """Every prompt of the call, tokenized and within the limits."""
    if isinstance(body, ChatCompletionRequest):
        prompts = [await tokenize_chat(body.messages, backend)]
    else:
        assert isinstance(body, CompletionRequest)
        prompts = await _completion_prompts(body, backend)
    for token_ids in prompts:
        _check_prompt(token_ids, backend, config)
    return prompts


async def _completion_prompts(body: CompletionRequest, backend: Backend) -> list[list[int]]:
    given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not given:
        raise ApiError(400, "prompt is empty: give text, token ids, or a list of them", param="prompt")
    if isinstance(given[0], int):
        given = [given]
    prompts: list[list[int]] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(await tokenize_text(prompt, backend))
        else:
            prompts.append(list(prompt))
    return prompts


async def tokenize_text(text: str, backend: Backend, add_special_tokens: bool = True) -> list[int]:
    return await _tokenize(len(text), lambda: backend.tokenizer.encode(text, add_special_tokens))


async def tokenize_chat(messages: Sequence[Message], backend: Backend, add_generation_prompt: bool = True) -> list[int]:
    rendered = [message.for_template() for message in messages]
    num_chars = sum(len(message["content"]) for message in rendered)
    return await _tokenize(num_chars, lambda: backend.tokenizer.chat_token_ids(rendered, add_generation_prompt))


async def _tokenize(num_chars: int, work: Callable[[], list[int]]) -> list[int]:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)


def _check_prompt(token_ids: list[int], backend: Backend, config: ServerConfig) -> None:
    limit = min(backend.max_model_len - 1, config.max_prompt_tokens or backend.max_model_len)
    if not token_ids:
        raise ApiError(400, "the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) > limit:
        raise ApiError(
            400,
            f"the prompt has {len(token_ids)} tokens, and this server takes at most {limit}: shorten it",
            code="context_length_exceeded",
            param="prompt",
        )
    if max(token_ids) >= backend.vocab_size:
        raise ApiError(
            400, f"prompt token ids go from 0 to {backend.vocab_size - 1}, got {max(token_ids)}", param="prompt"
        )
