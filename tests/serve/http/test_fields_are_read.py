"""Every field that a body may have is read by whoever answers it, or is in the list of those without effect."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from paceline.core.foreign_options import UNREAD
from paceline.serve.http import format_bodies, message_bodies, request_bodies, tool_bodies
from paceline.serve.responses import request as responses_request
from tests.serve import fake
from tests.serve.conftest import running

FUNCTION = {"name": "f", "description": "adds", "parameters": {"type": "object"}, "strict": False}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
SAMPLING: dict[str, Any] = {
    "model": "fake", "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "bad_words": ["x"],
    "allowed_token_ids": [97, 98], "seed": 1, "n": 2, "max_tokens": 4, "min_tokens": 1, "stop": "@",
    "stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    "add_special_tokens": False, "cache_salt": "a", "speculative": {"method": "ngram"},
    "prediction": {"type": "content", "content": "abc"}, "return_speculation": True, "return_token_sources": True,
    "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k",
}  # fmt: skip
STREAM = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "description": "d", "schema": SCHEMA, "strict": False}}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
    {"structured_outputs": {"structural_tag": {"type": "structural_tag"}}},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
    {"guided_regex": "a+"},
    {"guided_choice": ["a"]},
    {"guided_grammar": 'root ::= "a"'},
]  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": "fake", "instructions": "Be kind.", "max_output_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
    "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "speculative": {"method": "ngram"}, "cache_salt": "a",
    "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k",
}  # fmt: skip
ITEM = {"id": "i", "status": "completed"}
PART = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    ITEM | {"type": "message", "role": "assistant", "content": [PART]},
    ITEM | {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    ITEM | {"type": "function_call_output", "call_id": "1", "output": "3"},
]
SMALL = {"max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        SAMPLING | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 4},
        CHAT | SMALL | {"stream": True, "stream_options": STREAM, "include_reasoning": False},
        CHAT | SMALL | {"prompt_logprobs": 1, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}},
        CHAT | SMALL | {"continue_final_message": True},
        CHAT | SMALL | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        CHAT | SMALL | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        *(CHAT | SMALL | one for one in FORMATS),
    ],
    "/v1/completions": [
        SAMPLING | {"prompt": "abc", "echo": True, "logprobs": 1, "best_of": 2},
        {"prompt": "abc", "stream": True, "stream_options": STREAM} | SMALL,
        {"prompt": "abc", "prompt_logprobs": 1} | SMALL,
        *({"prompt": "abc"} | SMALL | one for one in FORMATS),
    ],
    "/v1/responses": [
        RESPONSE | {"input": "Hi", "store": True, "tools": [FUNCTION | {"type": "function"}], "tool_choice": "auto"},
        {"input": ITEMS, "max_output_tokens": 2, "stream": True, "stream_options": {"include_obfuscation": False}},
        {
            "input": "Hi",
            "max_output_tokens": 2,
            "tools": [FUNCTION | {"type": "function"}],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
        },
        {
            "input": "Hi",
            "text": {
                "verbosity": "medium",
                "format": {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": False},
            },
        },
    ],
    "/tokenize": [
        {"model": "fake", "prompt": "abc", "add_special_tokens": False},
        CHAT | {"tools": [TOOL], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": "fake", "tokens": [97], "skip_special_tokens": True}],
}
MODULES = (request_bodies, message_bodies, tool_bodies, format_bodies, responses_request)
# class -> where its fields stand in a body
PLACES = {
    "JsonSchema": "response_format.json_schema.", "ToolCall": "messages.tool_calls.", "_Part": "input.content.",
    "MessageItem": "input.", "FunctionCallItem": "input.", "FunctionCallOutputItem": "input.",
    "JsonSchemaTextFormat": "text.format.",
}  # fmt: skip


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[type, str]]]:
    """(class of a body or of a part of one, field) of all fields that are read from here on."""
    found: set[tuple[type, str]] = set()
    original = BaseModel.__getattribute__

    def reading(self: BaseModel, name: str) -> Any:
        if not name.startswith("_") and name in type(self).model_fields:
            found.add((type(self), name))
        if name == "model_dump":  # passed on whole
            found.update((type(self), field) for field in type(self).model_fields)
        return original(self, name)

    monkeypatch.setattr(BaseModel, "__getattribute__", reading)
    yield found


def is_constant(annotation: Any) -> bool:
    """Of one value and None, or made of such: it says nothing."""
    if get_origin(annotation) in (Union, UnionType):
        return all(map(is_constant, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation.model_fields:
        return all(is_constant(info.annotation) for info in annotation.model_fields.values())
    return annotation is type(None) or (get_origin(annotation) is Literal and len(get_args(annotation)) == 1)


def fields() -> Iterator[tuple[type[BaseModel], str]]:
    """Of all bodies and parts of bodies, those that can say something."""
    for module in MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and not kind.__subclasses__():
                yield from (
                    (kind, name) for name, info in kind.model_fields.items() if not is_constant(info.annotation)
                )


def test_fields_that_nobody_reads_are_the_listed_ones(read: set[tuple[type, str]]) -> None:
    with running(fake.FakeBackend(), reasoning_parser="think") as server, server.client() as http:
        for path, bodies in BODIES.items():
            for body in bodies:
                answer = http.post(path, json=body)
                assert answer.status_code == 200, (path, body, answer.text)
    unread = sorted({PLACES.get(kind.__name__, "") + name for kind, name in fields() if (kind, name) not in read})
    assert unread == sorted(UNREAD)
