"""Request bodies: OpenAI's fields, vLLM's additions under vLLM's names, and ours for speculation.

A field is honoured or refused, never ignored: an unknown one is an error that names it, and OpenAI's fields for what
this server does not do (audio, ...) are refused with a reason. The few that only label a request are accepted.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictBool, WithJsonSchema, model_validator

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.serve.http.errors import ApiError
from paceline.serve.http.format_bodies import FormatFields
from paceline.serve.http.message_bodies import Message, Text, check_conversation
from paceline.serve.http.tool_bodies import ToolChoice, Tools, check_tools

# OpenAI's field -> (values that ask for nothing, why anything else is refused)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "use tools, which replaced it"),
    "function_call": (("none", "auto"), "use tool_choice, which replaced it"),
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "reasoning_effort": ((), "the model has no reasoning levels"),
    "verbosity": ((), "the model has no verbosity levels: ask for a short answer in a message"),
    "web_search_options": ((), "this server does not search the web"),
    "store": ((False,), "chats are not stored: use /v1/responses"),
    "service_tier": (("auto", "default"), "there is one service tier"),
    "suffix": (("",), "the model fills in no middles: only prompt -> continuation"),
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = UNSUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (neutral, reason) in cls.unsupported.items():
            value = data.get(name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported: {reason}", code="unsupported_parameter", param=name)
        return {name: value for name, value in data.items() if name not in cls.unsupported}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class Prediction(BaseModel):
    """OpenAI's Predicted Outputs: text that the answer is expected to repeat in large parts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["content"] = "content"
    content: Text


MAX_TOKEN_ID = 2**31 - 1


def _token_ids(value: Any) -> list[int]:
    """Looked at as a whole: a validator that looks at each item takes a second for a long list of mistakes."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be a list of token ids (whole numbers)")
    if value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
        wrong = min(value) if min(value) < 0 else max(value)
        raise ValueError(f"must be a list of token ids from 0 to {MAX_TOKEN_ID}, got {wrong!r:.40}")
    return value


def _prompt(value: Any) -> Any:
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if isinstance(value, str) or kinds == {str} or value == []:
        return value
    if kinds == {int}:
        return _token_ids(value)
    if kinds == {list}:
        return [_token_ids(one) for one in value]
    raise ValueError("must be text, token ids, or a list of one of these")


_TEXT_SCHEMA: dict[str, Any] = {"type": "string"}
_IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
_PROMPT_SCHEMA = {
    "anyOf": [_TEXT_SCHEMA, _IDS_SCHEMA, *({"type": "array", "items": kind} for kind in (_TEXT_SCHEMA, _IDS_SCHEMA))]
}
TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_IDS_SCHEMA)]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)
]


class GenerationRequest(FormatFields, Body):
    """What chat and plain completions have in common."""

    model: str | None = Field(None, description="a name from /v1/models; may be left out")
    # sampling
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id -> -100..100")
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    # length and end
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="only requests with the same salt share cached prefixes and past outputs"
    )
    # answer
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    # speculation
    speculative: dict[str, Any] | None = Field(
        None, description='this request\'s own choice: {"off": true}, {"method": "ngram", "num_speculative_tokens": 8}'
    )
    prediction: Prediction | None = None
    return_speculation: StrictBool = Field(False, description="add what speculation did for this request")
    return_token_sources: StrictBool = Field(False, description="add every token's text and which drafter it came from")
    # labels: they never change an answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options only goes with stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs only comes without stream", param="prompt_logprobs")
        self.check_formats()
        return self


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None

    @model_validator(mode="after")
    def _agree_on_tools(self) -> "ChatCompletionRequest":
        check_tools(self.tools, self.tool_choice)
        check_conversation(self.messages)
        return self

    @model_validator(mode="after")
    def _agree_on_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs only goes with logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_completion_tokens")
        return self


# fields that plain completions do not have -> their values that ask for nothing
_NO_TOOLS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    echo: StrictBool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in _NO_TOOLS.items():
            if data.get(name) is not None and data[name] not in neutral:
                message = f"{name} is not supported here: /v1/chat/completions calls tools"
                raise ApiError(400, message, code="unsupported_parameter", param=name)
        return {name: value for name, value in data.items() if name not in _NO_TOOLS}

    @model_validator(mode="after")
    def _no_best_of(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported: ask for n samples and choose yourself", param="best_of")
        return self


class TokenizeRequest(Body):
    """A text or a conversation, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Tools | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give prompt or messages, one of the two", param="prompt")
        if self.tools and self.messages is None:
            raise ApiError(400, "tools only go with messages", param="tools")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: StrictBool = False
