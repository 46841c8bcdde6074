"""From what a request asks for to the text that llguidance compiles.

Unhashable `required` names and the like are left to the compiler, which says what is wrong with them.
"""

import json
import re
from typing import Any, cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidRequestError
from paceline.structured.limits import GrammarLimits
from paceline.structured.schema_check import check_schema
from paceline.structured.tags import tag_grammar

# Between the parts of JSON, where the request says nothing. Bounded, because a model that has lost its way writes
# spaces without end otherwise; a choice: enough for a line break and an indentation of 31.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$/")


def grammar_text(wanted: StructuredOutputsParams, limits: GrammarLimits, special_tokens: dict[str, int]) -> str:
    try:
        return _grammar_text(wanted, limits, special_tokens)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(refusal(wanted, str(error))) from error


def refusal(wanted: StructuredOutputsParams, reason: str, num_chars: int = 400) -> str:
    """For the client. llguidance quotes the grammar in its reasons; a client knows its own grammar."""
    reason = " ".join(reason.split())
    shortened = reason if len(reason) <= num_chars else reason[:num_chars] + "..."
    return f"structured_outputs.{wanted.kind} cannot be used: {shortened}"


def _grammar_text(wanted: StructuredOutputsParams, limits: GrammarLimits, special_tokens: dict[str, int]) -> str:
    if wanted.kind == "json_object":
        return _json({"type": "object"}, wanted)
    if wanted.kind == "json":
        schema = json.loads(str(wanted.json))
        check_schema(schema, limits)
        return _json(schema, wanted)
    if wanted.kind == "choice":
        assert wanted.choice is not None
        return LLMatcher.grammar_from_regex("|".join(_escaped(text) for text in wanted.choice))
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(str(wanted.regex))
    if wanted.kind == "structural_tag":
        tags = json.loads(str(wanted.structural_tag))
        return LLMatcher.grammar_from_lark(tag_grammar(tags, limits, special_tokens))
    lark = _lark(str(wanted.grammar), limits)
    _check_schemas_in(lark, limits)
    return LLMatcher.grammar_from_lark(lark)


def _json(schema: Any, wanted: StructuredOutputsParams) -> str:
    if schema is True:
        schema = {}
    # Whatever the schema says about its own compilation: nothing that it asks for is to be left out.
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if wanted.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = wanted.whitespace_pattern or WHITESPACE
    return LLMatcher.grammar_from_json_schema(schema, overrides=cast(Any, options))


def _lark(text: str, limits: GrammarLimits) -> str:
    if is_lark_syntax(text):
        return text
    if len(text) > limits.max_ebnf_chars:
        raise InvalidRequestError(
            f"the grammar has {len(text)} characters; the limit for EBNF is {limits.max_ebnf_chars}. Write it in Lark"
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the translator raises bare Exception
        raise InvalidRequestError(
            f"the grammar is neither Lark (a rule `start: ...`) nor EBNF (a rule `root ::= ...`): {error}"
        ) from error


def _check_schemas_in(lark: str, limits: GrammarLimits) -> None:
    """`%json {...}` in a grammar, such as that of a tool's arguments, is a schema like any other."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", lark):
        try:
            schema, _ = decoder.raw_decode(lark, found.end())
        except ValueError:  # the compiler says what is wrong, if it is no text that only looks like it
            continue
        try:
            check_schema(schema, limits)
        except InvalidRequestError as error:
            line, column = lark.count("\n", 0, found.start()) + 1, found.start() - lark.rfind("\n", 0, found.start())
            raise ValueError(f"at {line}({column}): {error}") from error  # as the compiler says where


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in _REGEX_SPECIAL else letter for letter in text)
