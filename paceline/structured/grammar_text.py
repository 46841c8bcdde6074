"""From what a request asks for to the text that llguidance compiles.

Unhashable `required` names and the like are left to the compiler, which says what is wrong with them.
"""

import json
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
        raise InvalidRequestError(f"structured_outputs.{wanted.kind} cannot be used: {error}") from error


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
    return LLMatcher.grammar_from_lark(_lark(str(wanted.grammar), limits))


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


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in _REGEX_SPECIAL else letter for letter in text)
