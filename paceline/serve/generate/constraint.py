"""What holds an answer to a form: the request's format, its tools, or both, as one constraint for the engine."""

import re
from typing import Any

from paceline.core.structured import StructuredOutputsParams
from paceline.errors import GrammarLimitError, InvalidOptionError, InvalidRequestError
from paceline.serve.generate.call import Call
from paceline.serve.http.errors import ApiError
from paceline.serve.http.format_bodies import FormatFields, JsonObjectFormat, JsonSchemaFormat, StructuralTagFormat
from paceline.serve.http.request_bodies import GenerationRequest
from paceline.serve.tools.plan import ToolPlan

_OPTIONS_NAME = re.compile(r"^structured_outputs\.\w+")
_ENGINES_NAME = re.compile(r"^structured_outputs\.\w+ cannot be used: ")
_PLACE = re.compile(r"at (?P<line>\d+)\(\d+\): (?P<reason>.*?)(?= \d+ \| |$)")
_ARGUMENTS = re.compile(r"arguments_(\d+):")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint_field(body: GenerationRequest, plan: ToolPlan | None) -> str | None:
    """The field that asks for a constraint, by which errors name it."""
    fields = body.formats()
    if fields:
        return fields[0]
    return None if plan is None else "tools"


def refusal(call: Call, error: InvalidRequestError | GrammarLimitError) -> Exception:
    """A constraint that the engine cannot use, or not any further, by the name of the field that asked for it."""
    field = constraint_field(call.body, call.plan)
    if field is None or call.params.structured_outputs is None:
        return error
    reason = _ENGINES_NAME.sub("", str(error))
    if call.plan is not None:
        return ApiError(400, _of_tool(call, reason), code="invalid_value", param="tools")
    return ApiError(400, f"{field} cannot be used: {reason}", code="invalid_value", param=field)


def _of_tool(call: Call, reason: str) -> str:
    """The compiler says in which line of the grammar something is wrong: each tool's schema is a line of its own."""
    constraint = call.params.structured_outputs
    assert constraint is not None and constraint.grammar is not None and call.plan is not None
    found = _PLACE.match(reason)
    if found is None:
        return f"tools cannot be used: {reason}"
    line = constraint.grammar.split("\n")[int(found["line"]) - 1]
    number = _ARGUMENTS.match(line)
    what = f"the parameters of {call.plan.tools[int(number[1])].function.name!r}" if number else "response_format"
    return f"{what} cannot be used: {found['reason']}"


def constraint(body: GenerationRequest, plan: ToolPlan | None) -> StructuredOutputsParams | None:
    try:
        return _constraint(body, plan)
    except InvalidOptionError as error:
        field = constraint_field(body, plan)
        message = str(error) if field in (None, "structured_outputs") else _OPTIONS_NAME.sub(str(field), str(error))
        raise ApiError(400, message, code="invalid_value", param=field) from None


def _constraint(body: GenerationRequest, plan: ToolPlan | None) -> StructuredOutputsParams | None:
    if plan is None:
        return _of_fields(body)
    field = next(iter(body.formats()), None)
    if field is not None and field != "response_format":
        message = f"{field} does not go with tools: use response_format, or tool_choice 'none'"
        raise ApiError(400, message, param=field)
    content = None if plan.required else _content_schema(body)
    grammar = plan.grammar(content)
    return None if grammar is None else StructuredOutputsParams(grammar=grammar)


def _content_schema(body: GenerationRequest) -> dict[str, Any] | None:
    form = body.response_format
    if isinstance(form, JsonSchemaFormat):
        return form.json_schema.json_schema or ANY_OBJECT
    if isinstance(form, StructuralTagFormat):
        message = "response_format of the type structural_tag does not go with tools: describe them in the tag"
        raise ApiError(400, message, param="response_format")
    return ANY_OBJECT if isinstance(form, JsonObjectFormat) else None


def _of_fields(body: FormatFields) -> StructuredOutputsParams | None:
    form, given = body.response_format, body.structured_outputs
    if isinstance(form, JsonSchemaFormat) and form.json_schema.json_schema is not None:
        return StructuredOutputsParams(json=form.json_schema.json_schema)
    if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(form, StructuralTagFormat):
        return StructuredOutputsParams(structural_tag=form.model_dump())
    if given is not None:
        return StructuredOutputsParams(**given.model_dump(by_alias=True))
    guided: dict[str, Any] = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
        "whitespace_pattern": body.guided_whitespace_pattern,
    }
    if all(value is None for value in guided.values()):
        return None
    return StructuredOutputsParams(**guided)
