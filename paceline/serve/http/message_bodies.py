"""The messages of a conversation, tool calls and their results included."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.serve.http.errors import ApiError
from paceline.serve.http.tool_bodies import MAX_TOOLS, ToolCall


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


Text = str | Annotated[list[TextPart], Field(max_length=1024)]


def as_text(content: Text | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        """An answer sent back as it came has fields such as `refusal: null`."""
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _agree(self) -> "Message":
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls only go with the role 'assistant', not with {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("the role 'tool' and tool_call_id go together: name the call that the message answers")
        return self

    @property
    def is_of_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role  # OpenAI's new name for the same thing
        message: dict[str, Any] = {"role": role, "content": as_text(self.content)}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def call_for_template(call: ToolCall) -> dict[str, Any]:
    """Templates take the arguments as an object. What a model wrote that is none stays text."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def check_conversation(messages: Sequence[Message]) -> None:
    """Every result belongs to a call that was made before it."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in known:
            raise ApiError(
                400,
                f"messages.{index}: no assistant message before it has a call with the id "
                f"{message.tool_call_id!r:.80}: send the message with its tool_calls too",
                param="messages",
            )
