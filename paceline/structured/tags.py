"""Structural tags: free text in which certain beginnings start something structured, as a Lark grammar.

vLLM's and xgrammar's formats. The older one is a list of structures and what triggers them:

    {"structures": [{"begin": "<get_weather>", "schema": {...}, "end": "</get_weather>"}], "triggers": ["<get_"]}

The newer one is a tree under "format", of the types in `_WRITERS`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.option_values import shown
from paceline.errors import InvalidRequestError
from paceline.structured.limits import GrammarLimits
from paceline.structured.schema_check import check_schema


def tag_grammar(tags: Any, limits: GrammarLimits, special_tokens: Mapping[str, int]) -> str:
    """The grammar; control tokens in literal text stand for themselves."""
    writer = _Writer(limits, special_tokens)
    start = writer.rule(_format(tags))
    return "\n".join(["%llguidance {}", f"start: {start}", "TAG_TEXT: /(.|\\n)*/", *writer.rules])


def _format(tags: Any) -> Any:
    if not isinstance(tags, Mapping):
        raise InvalidRequestError(f"structural_tag must be a JSON object, got {shown(tags)}")
    if "format" in tags:
        return tags["format"]
    if "structures" not in tags or "triggers" not in tags:
        raise InvalidRequestError("structural_tag needs `format`, or `structures` and `triggers`")
    structures = [
        {
            "begin": _get(one, "begin", str),
            "content": {"type": "json_schema", "json_schema": _get(one, "schema", object)},
            "end": _get(one, "end", str),
        }
        for one in _get(tags, "structures", list)
    ]
    return {"type": "triggered_tags", "triggers": tags["triggers"], "tags": structures}


class _Writer:
    def __init__(self, limits: GrammarLimits, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._limits = limits
        self._special = sorted(special_tokens.items(), key=lambda item: -len(item[0]))

    def rule(self, part: Any) -> str:
        """The name of a new rule for this part."""
        kind = _get(part, "type", str)
        if kind not in _WRITERS:
            raise InvalidRequestError(
                f"structural_tag has a part of type {shown(kind)}, which is not supported; known: {', '.join(_WRITERS)}"
            )
        return self._add(_WRITERS[kind](self, part))

    def _add(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        for name, token in self._special:
            before, found, after = text.partition(name)
            if found:
                return " ".join(filter(None, (self.literal(before), f"<[{token}]>", self.literal(after))))
        return json.dumps(text) if text else ""

    def const_string(self, part: Any) -> str:
        return self.literal(_get(part, "value", str)) or '""'

    def json_schema(self, part: Any) -> str:
        schema = _get(part, "json_schema", object)
        check_schema(schema, self._limits)
        if schema is not True and not isinstance(schema, Mapping):
            raise InvalidRequestError(f"a schema in structural_tag must be a JSON object, got {shown(schema)}")
        return "%json " + json.dumps({} if schema is True else schema)

    def any_text(self, part: Any) -> str:
        return "TAG_TEXT"

    def regex(self, part: Any) -> str:
        pattern: str = _get(part, "pattern", str)
        pattern = pattern.replace("/", "\\/").replace("\n", "\\n")
        return f"/{pattern}/"

    def grammar(self, part: Any) -> str:
        text: str = _get(part, "grammar", str)
        return "%lark {\n" + text + "\n}"

    def sequence(self, part: Any) -> str:
        return " ".join(self.rule(one) for one in _get(part, "elements", list)) or '""'

    def either(self, part: Any) -> str:
        return " | ".join(self.rule(one) for one in _some(part, "elements"))

    def tag(self, part: Any) -> str:
        begin = self.literal(_get(part, "begin", str))
        content = self.rule(_get(part, "content", object))
        return " ".join(filter(None, (begin, content, self.literal(_get(part, "end", str)))))

    def triggered_tags(self, part: Any) -> str:
        """Text up to a trigger, lazily, so that the trigger is never read as text; then the tag that it begins."""
        triggers = [trigger for trigger in _some(part, "triggers") if isinstance(trigger, str) and trigger]
        options = []
        for tag in _some(part, "tags"):
            begin = _get(tag, "begin", str)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequestError(f"structural_tag begins {shown(begin)} with none of its triggers {triggers}")
            is_special = any(trigger.startswith(name) for name, _ in self._special)
            text = "TAG_TEXT " + self.literal(trigger)
            head = text if is_special else self._add(text, "[lazy]")
            rest = self.rule({"type": "tag", **tag, "begin": begin[len(trigger) :]})
            options.append(self._add(f"{head} {rest}"))
        one_of = "(" + " | ".join(options) + ")"
        if part.get("stop_after_first"):
            return one_of if part.get("at_least_one") else f"{one_of} | TAG_TEXT"
        return f"{one_of}{'+' if part.get('at_least_one') else '*'} TAG_TEXT"

    def tags_with_separator(self, part: Any) -> str:
        one_of = "(" + " | ".join(self.rule({"type": "tag", **tag}) for tag in _some(part, "tags")) + ")"
        separator = self.literal(_get(part, "separator", str))
        if part.get("stop_after_first"):
            return one_of if part.get("at_least_one") else f"{one_of}?"
        many = f"{one_of} ({separator} {one_of})*"
        return many if part.get("at_least_one") else f"({many})?"


_WRITERS: dict[str, Callable[[_Writer, Any], str]] = {
    "const_string": _Writer.const_string,
    "json_schema": _Writer.json_schema,
    "any_text": _Writer.any_text,
    "regex": _Writer.regex,
    "grammar": _Writer.grammar,
    "sequence": _Writer.sequence,
    "or": _Writer.either,
    "tag": _Writer.tag,
    "triggered_tags": _Writer.triggered_tags,
    "tags_with_separator": _Writer.tags_with_separator,
}


def _get(part: Any, key: str, kind: type) -> Any:
    if not isinstance(part, Mapping) or not isinstance(part.get(key), kind) or part.get(key) is None:
        name = {str: "text", list: "a list", object: "given"}[kind]
        raise InvalidRequestError(f"structural_tag: {key!r} must be {name} in {shown(part)}")
    return part[key]


def _some(part: Any, key: str) -> list[Any]:
    found: list[Any] = _get(part, key, list)
    if not found:
        raise InvalidRequestError(f"structural_tag: {key!r} is empty in {shown(part)}")
    return found
