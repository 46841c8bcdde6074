"""A request for a response as a request for a chat: the engine's side knows only the latter."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from paceline.serve.http.errors import ApiError
from paceline.serve.http.message_bodies import Message
from paceline.serve.http.request_bodies import ChatCompletionRequest
from paceline.serve.http.tool_bodies import CalledFunction, ToolCall
from paceline.serve.http.validation import explain
from paceline.serve.responses.request import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    JsonSchemaTextFormat,
    NamedFunction,
    ResponsesRequest,
    text_of,
)

_SAME_NAME = (
    "model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
    "speculative", "cache_salt",
)  # fmt: skip
# chat's names in errors -> the names that this client knows
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
_NAMES |= {"response_format": "text", "prompt": "input"}


def own_name(error: ApiError) -> ApiError:
    """An error of the chat that was made of a request, by the request's own names."""
    own = _NAMES.get(error.param or "")
    if own is None:
        return error
    message = re.sub(rf"\b{error.param}\b", own, str(error))
    return ApiError(error.status, message, code=error.code, param=own, headers=error.headers)


def chat_request(body: ResponsesRequest, before: Sequence[Message]) -> ChatCompletionRequest:
    """`before`: the conversation up to here, without instructions."""
    first = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    try:
        return ChatCompletionRequest(
            messages=[*first, *before, *messages_of(body.input)],
            max_completion_tokens=body.max_output_tokens,
            response_format=_response_format(body),
            tools=_tools(body),  # type: ignore[arg-type]
            tool_choice=_tool_choice(body),
            **fields,
        )
    except ValidationError as error:
        raise own_name(explain(error)) from None
    except ApiError as error:
        raise own_name(error) from None


def messages_of(given: str | Sequence[InputItem]) -> list[Message]:
    """Calls that follow each other are calls of one message, as they were when the model made them."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    for item in given:
        if isinstance(item, FunctionCallItem):
            _add_call(messages, item)
        elif isinstance(item, FunctionCallOutputItem):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=text_of(item.output)))
        else:
            messages.append(Message(role=item.role, content=text_of(item.content)))
    return messages


def _add_call(messages: list[Message], item: FunctionCallItem) -> None:
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None:
        messages.append(Message(role="assistant", tool_calls=[call]))
    else:
        messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]})


def _response_format(body: ResponsesRequest) -> Any:
    form = None if body.text is None else body.text.format
    if not isinstance(form, JsonSchemaTextFormat):
        return None if form is None else {"type": form.type}
    schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    if body.tools is None:
        return None
    return [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools]


def _tool_choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, NamedFunction):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice
