"""llguidance beside xgrammar: what compiling and masks cost, and what becomes of schemas that cannot be held.

    pip install xgrammar
    python benchmarks/grammar_engines.py

Processor time of one thread. Each mask is the fastest of five walks over the same text. Prints what docs/structured.md
has under "Why llguidance and not xgrammar".
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import xgrammar  # type: ignore[import-not-found,unused-ignore]
from llguidance import LLMatcher
from structured_schemas import large_schema, schemas
from structured_texts import EXTRACTION_SCHEMA

from paceline.core.structured import StructuredOutputsParams
from paceline.models.loader import load_model
from paceline.structured.compiler import token_view
from paceline.structured.grammar_text import grammar_text
from paceline.structured.limits import DEFAULT_LIMITS

ORDER: dict[str, Any] = {
    "customer_name": "Marta Lindqvist",
    "customer_email": "marta.lindqvist@example.com",
    "delivery_address": {"street": "Harbour Street 14", "city": "Gothenburg"},
    "order_lines": [
        {"product": "canvas backpack", "quantity": 2, "unit_price": 59.5},
        {"product": "steel water bottle", "quantity": 4, "unit_price": 18.0},
    ],
    "payment_method": "invoice",
}
STRINGS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "minLength": 20, "maxLength": 200},
    "minItems": 3,
}
TEXTS: list[Any] = ["The river was wide that spring, and nobody crossed it before the ice had gone"] * 4
WRONG = {  # keyword -> schema, an answer that does not match it
    "not": ({"type": "string", "not": {"const": "a"}}, '"a"'),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    "oneOf": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, '"a"'),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, "0.3"),
}


def seconds_of(work: Callable[[], Any], rounds: int = 3) -> tuple[float, Any]:
    best = float("inf")
    for _ in range(rounds):
        begin_s = time.thread_time()
        made = work()
        best = min(best, time.thread_time() - begin_s)
    return best, made


def walk_us(mask: Callable[[], object], take: Callable[[int], object], tokens: Sequence[int]) -> list[float]:
    times = []
    for token in tokens:
        begin_ns = time.thread_time_ns()
        mask()
        times.append((time.thread_time_ns() - begin_ns) / 1e3)
        assert take(token), "the text does not match"
    return times


def fastest(walks: Sequence[Sequence[float]]) -> str:
    times = [min(each) for each in zip(*walks, strict=True)]
    return f"mean {statistics.mean(times):.0f}, median {statistics.median(times):.0f}, longest {max(times):.0f} us"


def main() -> None:
    model = load_model("smollm2-135m")
    tokenizer, size = model.tokenizer, model.decoder.config.vocab_size
    view = token_view(tokenizer, size)
    names = [""] * size
    for name, token in tokenizer.vocabulary().items():
        if token < size:
            names[token] = name
    kind, ends = xgrammar.VocabType.BYTE_LEVEL, sorted(view.eos_token_ids)
    info = xgrammar.TokenizerInfo(names, vocab_type=kind, vocab_size=size, stop_token_ids=ends)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, size)

    def ours(schema: Any) -> LLMatcher:
        text = grammar_text(StructuredOutputsParams(json=schema), DEFAULT_LIMITS, {})
        return LLMatcher(view.tokenizer, text, log_level=0)

    def theirs(schema: Any) -> Any:
        return compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)

    for what, schema, answer in (("order", EXTRACTION_SCHEMA, ORDER), ("strings", STRINGS, TEXTS)):
        tokens = tokenizer.encode(json.dumps(answer, indent=2))
        (our_s, matcher), (their_s, compiled) = (
            seconds_of(lambda s=schema: ours(s)),
            seconds_of(lambda s=schema: theirs(s)),
        )
        print(f"{what}: compiled in {1e3 * our_s:.1f} and {1e3 * their_s:.1f} ms")
        our_walks, their_walks = [], []
        for _ in range(5):
            one, other = matcher.deep_copy(), xgrammar.GrammarMatcher(compiled)
            our_walks.append(walk_us(one.compute_bitmask, one.consume_token, tokens))
            fill = lambda m=other: m.fill_next_token_bitmask(bits)  # noqa: E731
            their_walks.append(walk_us(fill, other.accept_token, tokens))
        print(f"  masks: {fastest(our_walks)}; {fastest(their_walks)}")
    large = large_schema(2000)
    our_s, their_s = seconds_of(lambda: ours(large), 1)[0], seconds_of(lambda: theirs(large), 1)[0]
    print(f"2,000 properties: {our_s:.3f} and {their_s:.3f} s")
    made = [schema for _, schema in schemas(60)]
    for name, compile_one in (("llguidance", ours), ("xgrammar", theirs)):
        times = [1e3 * seconds_of(lambda s=schema, c=compile_one: c(s), 1)[0] for schema in made]
        print(f"60 schemas with {name}: median {statistics.median(times):.1f}, longest {max(times):.1f} ms")
    for keyword, (schema, answer) in WRONG.items():
        matcher, tokens = ours(schema), tokenizer.encode(answer)
        refused = matcher.is_error()
        passes = not refused and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        other = xgrammar.GrammarMatcher(theirs(schema))
        other_passes = other.accept_string(answer) and other.accept_token(ends[0])
        said = "refuses" if refused else f"lets pass: {passes}"
        print(f"{keyword}: llguidance {said}; xgrammar lets pass: {other_passes}")


if __name__ == "__main__":
    main()
