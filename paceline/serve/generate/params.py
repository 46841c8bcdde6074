"""From a request body to what the engine takes: prompts as token ids, and `SamplingParams`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.core.sampling_params import SamplingParams
from paceline.llm.worker import in_worker
from paceline.serve.config import ServerConfig
from paceline.serve.generate.constraint import constraint
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.http.errors import ApiError
from paceline.serve.http.limits import check_logprobs, tokens_within_logprobs
from paceline.serve.http.message_bodies import Message, as_text
from paceline.serve.http.request_bodies import ChatCompletionRequest, CompletionRequest, GenerationRequest
from paceline.serve.http.tool_bodies import Tool
from paceline.serve.tools.families import takes_tools
from paceline.serve.tools.generic import generic_messages
from paceline.serve.tools.plan import ToolPlan

CHARS_PER_MESSAGE = 100  # what a chat template takes for a message, in characters of text
MAX_TOKEN_DIGITS = 10  # of a token id as a key of JSON

# Same name and meaning in the body and in SamplingParams; left out means SamplingParams' own default.
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "bad_words", "allowed_token_ids", "seed", "n", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


async def sampling_params(
    body: GenerationRequest,
    prompt_lens: list[int],
    backend: ServedEngine,
    config: ServerConfig,
    plan: ToolPlan | None = None,
) -> SamplingParams:
    """One set of options for all prompts of a call, `max_tokens` resolved."""
    options = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    num_choices, logprobs = len(prompt_lens) * (body.n or 1), _logprobs(body)
    max_tokens = _max_tokens(
        body, max(prompt_lens), backend, config, tokens_within_logprobs(num_choices, logprobs, config)
    )
    params = SamplingParams(
        **options,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        speculative=await _speculative(body, backend),
        structured_outputs=constraint(body, plan),
    )
    if plan is not None and plan.format.special_id is not None:
        params = replace(params, skip_special_tokens=False)  # a call's marker must be seen
    echo = isinstance(body, CompletionRequest) and bool(body.echo)
    if echo and logprobs is not None:
        params = replace(params, prompt_logprobs=logprobs)
    check_logprobs(params, prompt_lens, echo, config)
    return params


def _max_tokens(
    body: GenerationRequest, prompt_len: int, backend: ServedEngine, config: ServerConfig, within_logprobs: int | None
) -> int:
    room = backend.max_model_len - prompt_len
    limit = config.max_tokens_limit
    asked = body.max_tokens
    if isinstance(body, ChatCompletionRequest):
        asked = body.max_completion_tokens or asked
    if asked is None:
        default = 16 if isinstance(body, CompletionRequest) else room  # OpenAI's defaults
        return max(1, min(default, room, limit or room, room if within_logprobs is None else within_logprobs))
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
        if not token.isascii() or not token.isdigit() or len(token) > MAX_TOKEN_DIGITS:
            raise ApiError(400, f"logit_bias maps token ids to numbers, got the key {token!r:.80}", param="logit_bias")
        bias[int(token)] = value
    return bias


async def _speculative(body: GenerationRequest, backend: ServedEngine) -> dict[str, Any] | None:
    """The request's own choice, its prediction as token ids wherever it was given."""
    given = body.speculative or {}
    text = given.get("prediction")
    if body.prediction is not None:
        if text is not None:
            raise ApiError(400, "prediction is given twice, by itself and in speculative: give one", param="prediction")
        text = as_text(body.prediction.content)
    if not isinstance(text, str):
        return body.speculative
    return {**given, "prediction": await tokenize_text(text, backend, add_special_tokens=False)}


async def prompt_token_ids(body: GenerationRequest, backend: ServedEngine, config: ServerConfig) -> list[list[int]]:
    """Every prompt of the call, tokenized and within the limits."""
    if isinstance(body, ChatCompletionRequest):
        tools = () if body.tool_choice == "none" else body.tools or ()
        prompts = [await tokenize_chat(body.messages, backend, tools=tools)]
    else:
        assert isinstance(body, CompletionRequest)
        prompts = await _completion_prompts(body, backend)
    for token_ids in prompts:
        _check_prompt(token_ids, backend, config)
    return prompts


async def _completion_prompts(body: CompletionRequest, backend: ServedEngine) -> list[list[int]]:
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


async def tokenize_text(text: str, backend: ServedEngine, add_special_tokens: bool = True) -> list[int]:
    return await in_worker(len(text), lambda: backend.tokenizer.encode(text, add_special_tokens))


async def tokenize_chat(
    messages: Sequence[Message],
    backend: ServedEngine,
    add_generation_prompt: bool = True,
    tools: Sequence[Tool] = (),
) -> list[int]:
    rendered = [message.for_template() for message in messages]
    num_chars = sum(len(message["content"]) + CHARS_PER_MESSAGE for message in rendered)
    tokenizer = backend.tokenizer
    if not tools and not any(message.is_of_tools for message in messages):
        return await in_worker(num_chars, lambda: tokenizer.chat_token_ids(rendered, add_generation_prompt))
    told = [tool.for_template() for tool in tools]
    num_chars += len(str(told))
    if not takes_tools(tokenizer.chat_template):
        rendered, told = generic_messages(rendered, told), []
    return await in_worker(
        num_chars, lambda: tokenizer.chat_token_ids(rendered, add_generation_prompt, tools=told or None)
    )


def _check_prompt(token_ids: list[int], backend: ServedEngine, config: ServerConfig) -> None:
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
