"""Whatever is asked for compiles, or is refused within a second with the reason; compiled grammars are kept, within
bounds."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher

from benchmarks.structured_schemas import large_schema
from paceline.core import processors
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.errors import InvalidRequestError, RequestFailedError
from paceline.structured.compiler import Grammars
from paceline.structured.limits import GrammarLimits
from paceline.structured.trial import Trial
from tests.structured.processor_time import end_processes_of_gone_engines, trial_s

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level BPE writes as themselves
END = 256


class ByteTokenizer:
    """Token i is byte i, as byte-level BPE writes it; the end token is 256."""

    eos_token_ids = (END,)
    has_chat_template = False

    def vocabulary(self) -> dict[str, int]:
        shifted = (byte for byte in range(256) if byte not in BYTES)
        letters = {byte: chr(byte) for byte in BYTES} | {byte: chr(256 + i) for i, byte in enumerate(shifted)}
        return {letter: byte for byte, letter in letters.items()} | {"<end>": END}

    def definition(self) -> str:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(self.vocabulary(), []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<end>"])
        return str(made.to_str())


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(ByteTokenizer(), END + 1)  # type: ignore[arg-type]
    made.prepare()
    yield made
    made.close()


def matches(grammars: Grammars, text: str, **wanted: Any) -> bool:
    """Whether the text, and then the end, can be written."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
    request = Request("bytes", [0], params, max_tokens=1000, seed=0)
    grammars.constrain(request)
    assert request.constraint is not None
    path = [*text.encode(), END]
    return all(bool(request.constraint.allowed(path[:i])[token]) for i, token in enumerate(path))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    "wanted, good, bad",
    [
        ({"json": PERSON}, '{"name": "Ada",\n  "age": 36}', '{"name": "Ada"}'),
        ({"json": PERSON}, '{"name":"Ada","age":0}', '{"name":"Ada","age":-1}'),
        ({"json": PERSON}, '{"name":"Äß☃","age":0}', '{"name":"Adalbert","age":0}'),
        ({"json": PERSON, "disable_any_whitespace": True}, '{"name":"Ada","age":3}', '{"name": "Ada","age":3}'),
        ({"json": PERSON, "whitespace_pattern": " "}, '{"name": "Ada", "age": 3}', '{"name":\n"Ada","age":3}'),
        ({"json": PERSON}, '{"name":"Ada","age":3}', '{"name":' + " " * 40 + '"Ada","age":3}'),  # bounded by default
        ({"json": "true"}, "[1, null]", "[1, nul]"),
        ({"json_object": True}, '{"a": [1, {"b": "\\n"}]}', "[1]"),
        ({"regex": r"\d{3}-[a-z/]+\n?"}, "123-a/b\n", "12-a"),
        ({"choice": ["yes/no", "a.b", "ä(\n)"]}, "ä(\n)", "axb"),
        ({"choice": ["yes", "yes, sir"]}, "yes, sir", "yes,"),
        ({"grammar": 'start: "a" B\nB: /[0-9]+/'}, "a12", "a"),
        ({"grammar": 'root ::= "a" b\nb ::= [0-9]+ | "(" b ")"'}, "a((1))", "a(1"),
        ({"structural_tag": TAGS}, "so <f>12</f> and\nmore <g>", "so <f>x</f>"),
        ({"structural_tag": json.dumps(TAGS)}, "no tag at all", "so <f>12"),
    ],
)
def test_each_kind_allows_what_it_says(grammars: Grammars, wanted: dict[str, Any], good: str, bad: str) -> None:
    assert matches(grammars, good, **wanted)
    assert not matches(grammars, bad, **wanted)


TAG = {"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]/"}, "end": "</a>"}


@pytest.mark.parametrize(
    "form, good, bad",
    [
        ({"type": "const_string", "value": 'x"y'}, 'x"y', "x"),
        ({"type": "tag", **TAG}, "<a>1/</a>", "<a>1</a>"),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, {"type": "tag", **TAG}]},
         "x<a>1/</a>", "<a>1/</a>"),
        ({"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "const_string", "value": "y"}]},
         "y", "xy"),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], "at_least_one": True}, "hm <a>1/</a>!", "hm"),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], "at_least_one": True,
          "stop_after_first": True}, "hm <a>1/</a>", "hm <a>1/</a> <a>1/</a>"),
        ({"type": "tags_with_separator", "tags": [TAG], "separator": ", ", "at_least_one": True},
         "<a>1/</a>, <a>2/</a>", ""),
        ({"type": "tag", "begin": "", "content": {"type": "grammar", "grammar": 'start: "q"+'}, "end": "."},
         "qq.", "q"),
    ],
)  # fmt: skip
def test_each_part_of_a_structural_tag(grammars: Grammars, form: Any, good: str, bad: str) -> None:
    wanted = {"structural_tag": {"type": "structural_tag", "format": form}}
    assert matches(grammars, good, **wanted)
    assert not matches(grammars, bad, **wanted)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ENDLESS = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"json": {"not": {"type": "string"}}}, "not"),
    "if": ({"json": {"if": {"type": "string"}, "then": {"minLength": 2}}}, '"if"'),
    "uniqueItems": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "dependentRequired": ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
    "unknown format": ({"json": {"type": "string", "format": "moon"}}, "moon"),
    "overlapping oneOf": ({"json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}}, "oneOf"),
    "unimplemented, made lenient": ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
    "false": ({"json": "false"}, "no answer could match"),
    "missing reference": ({"json": {"$ref": "#/$defs/a"}}, "does not exist"),
    "foreign reference": ({"json": {"$ref": "http://example.com/a.json"}}, "example.com"),
    "reference to itself": ({"json": {"$ref": "#"}}, "leads back to itself"),
    "circle of references": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        "leads back to itself",
    ),
    "recursion without end": ({"json": ENDLESS}, "recursion without end"),
    "endless items": ({"json": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}}, "recursion without end"),
    "100,000 enum values": ({"json": {"enum": [str(i) for i in range(100_000)]}}, "enum values are 100000"),
    "deep nesting": ({"json": nested(400)}, "recursion limit"),
    "contradiction": ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
    "30 patterns at once": (
        {"json": {"allOf": [{"type": "string", "pattern": f"(.|\n)*[a-{chr(98 + i % 20)}]x{i}(.|\n)*"}
                            for i in range(30)]}},
        "took more than",
    ),
    "endless schema in a grammar": (
        {"grammar": f"start: A b\nA: /x/\nb: %json {json.dumps(ENDLESS)}"}, "at 3(4): the JSON schema asks for recur",
    ),
    "enum values in a grammar": (
        {"grammar": "start: %json " + json.dumps({"enum": [str(i) for i in range(30_000)]})}, "enum values are 30000",
    ),
    "open group": ({"regex": "("}, "unclosed group"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around"),
    "back-reference": ({"regex": r"(a)\1"}, "backreferences"),
    "no grammar": ({"grammar": "foo"}, "neither Lark"),
    "undefined rule": ({"grammar": "start: foo"}, "foo"),
    "deep grammar": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
    "deep EBNF": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, ""),
    "long EBNF": ({"grammar": "root ::= " + "| ".join(['"abcdefgh"'] * 9000)}, "limit for EBNF"),
    "tag without trigger": ({"structural_tag": {**TAGS, "triggers": ["<x"]}}, "none of its triggers"),
    "tag of unknown type": ({"structural_tag": {"format": {"type": "qwen"}}}, "not supported"),
    "tag without parts": ({"structural_tag": {}}, "`format`, or `structures`"),
    "tag with a bad schema": (
        {"structural_tag": {**TAGS, "structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}]}}, "not",
    ),
}  # fmt: skip


def processor_s(grammars: Grammars) -> float:
    """Of this thread and of the process that tries grammars: what others do on the machine does not count."""
    return time.thread_time() + trial_s(grammars)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_within_a_second_with_the_reason(grammars: Grammars, name: str) -> None:
    wanted, reason = BAD[name]
    params = StructuredOutputsParams(**wanted)
    grammars.prepare()  # another process, where the last text ended it
    end_processes_of_gone_engines()
    begin_s = processor_s(grammars)
    with pytest.raises(InvalidRequestError) as refused:
        grammars.compile(params)
    assert processor_s(grammars) - begin_s < 1.0
    assert reason in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["string", "array"], "minItems": 1, "items": {"$ref": "#"}},
    ],
)
def test_recursion_that_can_end_is_taken(grammars: Grammars, schema: dict[str, Any]) -> None:
    grammars.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "regex",
    ["(a+)+b", "(a|a)*b", "(x+x+)+y", "(.*.*.*.*)*z", "(a?){1000}a{1000}", "(a{1,1000}){1,1000}", "(a|b)*a(a|b){30}",
     "((a{0,500}b){0,500}c){0,500}(d{0,500}e){0,500}" * 40],
)  # fmt: skip
def test_catastrophic_regexes_are_refused_or_do_no_harm(grammars: Grammars, regex: str) -> None:
    grammars.prepare()
    end_processes_of_gone_engines()
    begin_s = processor_s(grammars)
    with contextlib.suppress(InvalidRequestError, RequestFailedError):
        matches(grammars, "aaaaaaaaab", regex=regex)  # eleven masks
    assert processor_s(grammars) - begin_s < 2.0


def test_the_same_wish_is_compiled_once_and_the_cache_is_bounded() -> None:
    grammars = Grammars(ByteTokenizer(), END + 1, GrammarLimits(max_cached=3))  # type: ignore[arg-type]
    first = grammars.compile(StructuredOutputsParams(regex="a"))
    assert grammars.compile(StructuredOutputsParams(regex="a")) is first
    for letter in "bcde":
        grammars.compile(StructuredOutputsParams(regex=letter))
    assert len(grammars) == 3
    assert grammars.compile(StructuredOutputsParams(regex="a")) is not first
    grammars.close()


def test_large_texts_push_others_out_of_the_cache() -> None:
    grammars = Grammars(ByteTokenizer(), END + 1, GrammarLimits(max_cached_chars=100))  # type: ignore[arg-type]
    for letter in "abc":
        grammars.compile(StructuredOutputsParams(regex=letter * 60))
    assert len(grammars) == 1
    grammars.close()


def test_grammars_are_compiled_from_several_threads(grammars: Grammars) -> None:
    failed: list[BaseException] = []

    def compile_some(first: int) -> None:
        try:
            for i in range(first, first + 5):
                grammars.compile(StructuredOutputsParams(regex=f"x{i}"))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=compile_some, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_large_schema_takes_next_to_nothing_of_the_interpreter() -> None:
    """Looking through it takes some ten milliseconds: in a thread of the engine's process streams would wait for it."""
    trial = Trial(GrammarLimits())
    trial.start()
    wanted = StructuredOutputsParams(json=large_schema(2000))
    begin_s = time.thread_time()
    trial.grammar_text(wanted, {})
    assert time.thread_time() - begin_s < 0.004
    trial.close()


def test_while_a_grammar_compiles_passes_leave_it_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise streams wait for the scheduler's ticks, several of them in one step."""
    monkeypatch.setattr(processors, "usable_processors", lambda: 2)
    grammars = Grammars(ByteTokenizer(), END + 1)  # type: ignore[arg-type]
    seen: list[int] = []

    def tried(wanted: StructuredOutputsParams, special_tokens: Any) -> str:
        seen.append(processors.threads_left(2))
        return str(LLMatcher.grammar_from_regex(str(wanted.regex)))

    monkeypatch.setattr(grammars._trial, "grammar_text", tried)
    grammars.compile(StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequestError):
        grammars.compile(StructuredOutputsParams(regex="("))
    grammars.compile(StructuredOutputsParams(regex="a"))  # known
    assert seen == [1, 1] and processors.threads_left(2) == 2


def test_a_busy_machine_refuses_nothing() -> None:
    """The limit is processor time: here the process gets none for five times as long as it may compute."""
    trial = Trial(GrammarLimits(max_compile_s=0.1))
    trial.start()
    assert trial._process is not None
    child = trial._process.pid
    os.kill(child, signal.SIGSTOP)
    waking = threading.Timer(0.5, os.kill, (child, signal.SIGCONT))
    waking.start()
    begin_s = time.monotonic()
    assert trial.grammar_text(StructuredOutputsParams(regex="a+b"), {})
    assert time.monotonic() - begin_s > 0.3
    waking.join()
    trial.close()


def test_a_process_that_dies_is_replaced() -> None:
    trial, wanted = Trial(GrammarLimits(max_compile_s=5.0)), StructuredOutputsParams(regex="a")
    text = trial.grammar_text(wanted, {})
    assert text
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert trial.grammar_text(wanted, {}) == text
    trial.close()


def test_a_model_without_an_end_token_is_refused() -> None:
    class Endless(ByteTokenizer):
        eos_token_ids = ()  # type: ignore[assignment]

    grammars = Grammars(Endless(), END + 1)  # type: ignore[arg-type]
    grammars.prepare()  # a server starts all the same
    with pytest.raises(InvalidRequestError, match="end token"):
        grammars.compile(StructuredOutputsParams(regex="a"))


def test_tokens_that_only_the_head_has_are_never_allowed() -> None:
    grammars = Grammars(ByteTokenizer(), END + 10)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(.|\n)*"))
    request = Request("bytes", [0], params, max_tokens=10, seed=0)
    grammars.constrain(request)
    assert request.constraint is not None
    mask = request.constraint.allowed(())
    assert mask.shape == (END + 10,) and mask[ord("a")] and mask[END] and not np.any(mask[END + 1 :])
    grammars.close()
