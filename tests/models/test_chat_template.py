"""What chat templates may rely on, and what happens to messages that they cannot take."""

import datetime
from typing import Any

import pytest

from paceline.errors import InvalidRequestError, ModelLoadError
from paceline.models.chat_template import MAX_UNREAD_TOLD, ChatTemplate

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = HI, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, add_generation_prompt=True, options=options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{% for m in messages %}\n{{ m['role'] }}\n{% endfor %}\nend", "user\nend"),  # blocks swallow their line
        ("  {% if add_generation_prompt %}\nyes\n  {% endif %}", "yes\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ tools is none }}", "True"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
    ],
)
def test_helpers(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_generation_block_is_its_content() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert render(source) == "[hi]"


def test_options_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_an_option_that_the_template_does_not_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate("{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}", {})
    for options in ({"tools": None}, {"enable_thinking": True}, {"thinking": True}, {"thinking": False}):
        template.render(HI, add_generation_prompt=True, options=options)
    (record,) = caplog.records
    assert "'thinking' has no effect" in record.getMessage()
    template.render(HI, add_generation_prompt=True, options={f"option {i}": 1 for i in range(100)})
    assert len(caplog.records) == MAX_UNREAD_TOLD, "a client must not fill the log"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], "message 0 must be like"),
        ([{"content": "x"}], "message 0 must be like"),
        ([*HI, {"role": "user", "content": 3}], "message 1 has content 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
    ],
)
def test_bad_messages_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render("x", messages)


def test_a_message_with_calls_needs_no_content() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == '{"x": 1}'
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"x": 1}'


def test_a_templates_own_refusal_reaches_the_user() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_a_broken_template_is_found_at_load() -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})
