"""Chat templates: the Jinja text that turns messages into the prompt a model was trained on.

Templates come with the model, so they run in a sandbox. They expect a few helpers that Hugging Face defined:
`raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, blocks that swallow the line they stand on, and a
block `generation`.
"""

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidRequestError, ModelLoadError

logger = logging.getLogger("paceline")

Message = Mapping[str, Any]
MAX_UNREAD_TOLD = 16  # names of options: they come from clients, who must not fill the log
# Characters that mean nothing, of another plane than those of control_tokens.py: one of them marks a message's end.
PRIVATE_USE = range(0x100000, 0x10FFFE)


class GenerationBlock(Extension):
    """`{% generation %}` marks what the model says, for training, as in SmolLM3's template. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ... as templates call them
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._reads = meta.find_undeclared_variables(environment.parse(source)) | {"tools"}
        except TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not valid Jinja ({error})") from error
        self._told: set[str] = set()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, options: Mapping[str, Any]) -> str:
        plain = plain_messages(messages)
        self._tell_of_unread(options)
        values = {**self._special_tokens, "tools": None, "documents": None, **options}
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
        except (TemplateError, TypeError) as error:
            raise InvalidRequestError(f"the model's chat template cannot take these messages: {error}") from error

    def _tell_of_unread(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in self._reads and name not in self._told and len(self._told) < MAX_UNREAD_TOLD:
                self._told.add(name)
                logger.warning("chat_template_kwargs: %.64r has no effect: the chat template does not read it", name)


def is_jinja(source: str) -> bool:
    """Jinja itself, rather than the name of a file that has it."""
    return any(mark in source for mark in "{}\n")


def continued(
    template: ChatTemplate, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]
) -> str:
    """The chat up to the end of its last message, which the answer continues."""
    if add_generation_prompt:
        raise InvalidRequestError("continue_final_message and add_generation_prompt exclude each other: choose one")
    *others, last = plain_messages(messages)
    used = set().union(*(one["content"] for one in (*others, last)))
    mark = next(chr(code) for code in PRIVATE_USE if chr(code) not in used)
    marked = [*others, {**last, "content": last["content"] + mark}]
    text, found, _ = template.render(marked, add_generation_prompt=False, options=options).rpartition(mark)
    if not found:
        raise InvalidRequestError("the chat template does not show the last message, so it cannot be continued")
    return text


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Each message with its content as one string."""
    if not messages:
        raise InvalidRequestError('a chat needs at least one message, such as {"role": "user", "content": "Hello"}')
    return [_plain_message(i, message) for i, message in enumerate(messages)]


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """The message with its content as one string; parts that are not text are refused."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f'message {index} must be like {{"role": "user", "content": "..."}}, not {message!r}')
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_text_part(index, part) for part in content)
    if not isinstance(content, str):
        raise InvalidRequestError(f"message {index} has content {content!r}; it must be text")
    return {**message, "content": content}


def _text_part(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(f"message {index} has a part {part!r}; only text parts are supported")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
