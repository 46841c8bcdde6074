"""What an answer shall look like: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from paceline.serve.http.errors import ApiError
from paceline.serve.http.tool_bodies import checked_name


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None  # a schema is always held to

    _name = field_validator("name")(checked_name)


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_object"]


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(BaseModel):
    """vLLM's: the whole object is the tag."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(BaseModel):
    """vLLM's names. Exactly one of the first six."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: StrictBool = False
    whitespace_pattern: str | None = None


class FormatFields(BaseModel):
    """Fields of chat and plain completions. At most one of them asks for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def check_formats(self) -> None:
        given = self.formats()
        if len(given) > 1:
            message = f"{' and '.join(given)} both say what the answer looks like: give one"
            raise ApiError(400, message, param=given[1])
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            message = "guided_whitespace_pattern only goes with guided_json"
            raise ApiError(400, message, param="guided_whitespace_pattern")

    def formats(self) -> list[str]:
        """The fields that ask for a format."""
        names = ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"]
        names.append("guided_grammar")
        given = [name for name in names if getattr(self, name) is not None]
        return [name for name in given if not isinstance(getattr(self, name), TextFormat)]
