"""The body of `POST /v1/responses`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag, field_validator

from paceline.serve.http.format_bodies import JsonObjectFormat, TextFormat
from paceline.serve.http.request_bodies import Body
from paceline.serve.http.tool_bodies import MAX_TOOLS, checked_name, checked_parameters

_NO_REASONING = "the model has no reasoning that could be set"
_ONE_CALL = "this server runs no tools itself"

# As in request_bodies.UNSUPPORTED: field -> (values that ask for nothing, why anything else is refused)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "answers are made while the client waits"),
    "conversation": ((), "use previous_response_id"),
    "context_management": (([],), "the conversation is sent as it is"),
    "include": (([], ["reasoning.encrypted_content"]), "an answer has nothing more to include"),
    "max_tool_calls": ((), _ONE_CALL),
    "moderation": ((), "this server moderates nothing"),
    "prompt": ((), "this server has no prompt templates: send the text"),
    "prompt_cache_retention": (("in_memory",), "prefixes are cached in memory"),
    "reasoning": (({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}), _NO_REASONING),
    "service_tier": (("auto", "default"), "there is one service tier"),
    "top_logprobs": ((0,), "use /v1/chat/completions for log-probabilities"),
    "truncation": (("disabled",), "a conversation is never cut: shorten it"),
}


class _Part(BaseModel):
    """Text. What an answer of ours had beside it may come back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | Annotated[list[_Part], Field(max_length=1024)]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None  # items of an answer come back with these two
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _kind(value: Any) -> Any:
    return value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class JsonSchemaTextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None

    _name = field_validator("name")(checked_name)


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None  # the API's default: it asks for nothing


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    _name = field_validator("name")(checked_name)
    _parameters = field_validator("parameters")(checked_parameters)


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    name: str


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body):
    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = UNSUPPORTED

    model: str | None = Field(None, description="a name from /v1/models; may be left out")
    input: str | Annotated[list[InputItem], Field(max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: StrictBool | None = Field(None, description="keep the answer for previous_response_id; the default")
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: StrictBool | None = None
    stream_options: ResponseStreamOptions | None = None
    # sampling
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    # speculation and caching, as in chat
    speculative: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # labels: they never change an answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
