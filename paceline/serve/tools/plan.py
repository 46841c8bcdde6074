"""What one request has to do with tools: how the model is told, what it is held to, and who reads its calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.schema_recursion import check_recursion
from paceline.core.tokenizer import Tokenizer
from paceline.errors import InvalidRequestError
from paceline.serve.http.errors import ApiError
from paceline.serve.http.request_bodies import ChatCompletionRequest
from paceline.serve.http.tool_bodies import NamedTool, Tool
from paceline.serve.tools.events import Out
from paceline.serve.tools.families import FAMILIES, Family, family_name
from paceline.serve.tools.grammar import calls_grammar
from paceline.serve.tools.parsers import Parser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the served model is told of tools and writes its calls."""

    family: Family
    special_id: int | None  # of the family's marker, where that is a special token


def tool_format(tokenizer: Tokenizer, chosen: str | None) -> ToolFormat:
    """`chosen`: the parser's name, where the server was given one."""
    family = FAMILIES[family_name(tokenizer.chat_template, chosen)]
    return ToolFormat(family, _special_id(family.marker, tokenizer))


@dataclass(frozen=True, slots=True)
class ToolPlan:
    format: ToolFormat
    tools: tuple[Tool, ...]  # that may be called
    required: bool  # a call must come
    parallel: bool

    def check_schemas(self) -> None:
        """A function that no call can be right for is refused, also where nothing holds the model to its schema."""
        for tool in self.tools:
            name = tool.function.name
            try:
                check_recursion(tool.schema_of_arguments)
            except (InvalidRequestError, RecursionError) as error:
                reason = "it is too deeply nested" if isinstance(error, RecursionError) else str(error)
                message = f"the parameters of {name!r} cannot be used: {reason}"
                raise ApiError(400, message, code="invalid_value", param="tools") from None

    def parser(self) -> Parser:
        out = Out(max_calls=None if self.parallel else 1)
        return self.format.family.parser({tool.function.name for tool in self.tools}, out)

    def grammar(self, content: dict[str, Any] | None) -> str | None:
        """None: nothing holds the answer. `content`: the schema that an answer without calls is held to."""
        if not self.required and content is None and not any(tool.function.strict for tool in self.tools):
            return None
        return calls_grammar(
            self.format.family,
            self.tools,
            required=self.required,
            parallel=self.parallel,
            content=content,
            special_id=self.format.special_id,
        )


def tool_plan(body: ChatCompletionRequest, format: Callable[[], ToolFormat]) -> ToolPlan | None:
    """None where no tool may be called."""
    choice = body.tool_choice
    tools = tuple(body.tools or ())
    if not tools or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
    return ToolPlan(
        format(),
        tools,
        required=choice == "required" or isinstance(choice, NamedTool),
        parallel=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
    )


def _special_id(marker: str, tokenizer: Tokenizer) -> int | None:
    """Its id, if the marker is a token that `skip_special_tokens` leaves out of the text."""
    token_id = tokenizer.vocabulary().get(marker) if marker else None
    return token_id if token_id is not None and tokenizer.decode([token_id], True) == "" else None
