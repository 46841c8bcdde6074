"""Tools in request bodies: the functions that a model may call, which of them it shall call, and calls in a history."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from paceline.serve.http.errors import ApiError

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule


def checked_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(f"must be 1 to 64 letters, digits, '_' or '-', got {value!r:.80}")
    return value


def checked_parameters(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None and value.get("type", "object") != "object":
        raise ValueError(f"must be the JSON schema of an object, got the type {value['type']!r:.80}")
    return value


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="the JSON schema of the function's arguments")
    strict: StrictBool | None = Field(None, description="hold the arguments to the schema by a grammar")

    _name = field_validator("name")(checked_name)
    _parameters = field_validator("parameters")(checked_parameters)


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: all fields set, and without `strict`, which is between client and us."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema_of_arguments}}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        given = self.function.parameters
        return nothing if given is None else {"type": "object", **given}


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model made earlier."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients send back what they collected from a stream


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Names are unique, and what the choice asks for is there."""
    names = [tool.function.name for tool in tools or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ApiError(400, f"tools has two functions with the name {twice[0]!r}: rename one", param="tools")
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice is 'required' and there are no tools: give tools", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        known = f"tools has {', '.join(names)[:200]}" if names else "there are no tools"
        message = f"tool_choice asks for the function {choice.function.name!r:.80}, and {known}"
        raise ApiError(400, message, param="tool_choice")
