"""Answer bodies, for the API's description and for tests; the hot path builds the same shapes as plain dictionaries."""

from typing import Any, Literal

from pydantic import BaseModel


class TokenSource(BaseModel):
    """`source`: a drafter's name, "recovered" (the draft was wrong), "bonus", or "target" (no draft)."""

    id: int
    text: str
    source: str


class MadeFunctionCall(BaseModel):
    name: str
    arguments: str


class MadeToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: MadeFunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[MadeToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_sources: list[TokenSource] | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_sources: list[TokenSource] | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Speculation(BaseModel):
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    accepted_per_position: list[int]
    acceptance_histogram: list[int]
    lossy: bool


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    speculation: Speculation | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
