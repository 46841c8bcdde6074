"""On the real model: finished answers validate, drafts change nothing, several samples differ and all are valid.

benchmarks/structured.py does the same with 300 schemas and more methods."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from benchmarks.structured_schemas import schemas
from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.core.request import Request
from paceline.models.loader import LoadedModel, load_model
from paceline.spec.config.speculative_config import at_default_size
from paceline.structured.compiler import Grammars, token_view

NUM_SCHEMAS = 3


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LoadedModel:
    return load_model("smollm2-135m")


def jobs() -> tuple[list[str], list[SamplingParams]]:
    made = [schema for _, schema in schemas(NUM_SCHEMAS)]
    prompts = [f"An example with {', '.join(schema['properties'])} as JSON: " for schema in made for _ in range(2)]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=50,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for i, schema in enumerate(made)
        for temperature in (0.0, 1.0)
    ]
    return prompts, params


def test_answers_validate_and_are_the_same_with_drafts(model: LoadedModel) -> None:
    prompts, params = jobs()
    plain = LLM(model, {"method": "none"}, max_model_len=512).generate(prompts, params)
    num_finished = 0
    for output, one in zip(plain, params, strict=True):
        assert output.error is None
        if output.outputs[0].finish_reason == "stop":
            num_finished += 1
            assert one.structured_outputs is not None
            schema = json.loads(str(one.structured_outputs.json))
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert num_finished >= NUM_SCHEMAS
    llm = LLM(model, {"method": "merge", "members": ["grammar", "ngram"], "node_budget": 12}, max_model_len=512)
    drafted = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    by_member = llm.stats()["speculation"]["merge"]["by_member"]
    assert by_member["grammar"]["num_accepted_tokens"] > 20


def test_a_wanted_token_comes_exactly_where_the_mask_allows_it(model: LoadedModel) -> None:
    """Over the real vocabulary, along a text: forced keys, free strings, numbers, the end."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    vocab_size = model.decoder.config.vocab_size
    grammars = Grammars(model.tokenizer, vocab_size)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    rng = np.random.default_rng(0)
    text = model.tokenizer.encode('{"name": "Ada ☃", "age": 36}')
    for length in range(len(text) + 1):
        request, alone = (Request("a", [1], params, max_tokens=99, seed=0) for _ in range(2))
        for one in (request, alone):
            one.token_ids += text[:length]
            grammars.constrain(one)
            assert one.constraint is not None
        mask = alone.constraint.allowed(())  # type: ignore[union-attr]
        some = np.flatnonzero(mask)
        tokens = {*rng.integers(0, vocab_size, 300).tolist(), *rng.permutation(some)[:200].tolist(), *range(20)}
        for token in tokens:
            settled = request.constraint.settled((), token)  # type: ignore[union-attr]
            assert (settled == token) == mask[token]
            assert settled in (None, token) or some.tolist() == [settled]
    grammars.close()


def test_what_is_prepared_is_what_requests_use(model: LoadedModel) -> None:
    llm = LLM(model, {"method": "none"}, max_model_len=256)
    llm.engine.core.grammars.prepare()
    view = llm.engine.core.grammars.view()
    llm.generate("One", SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[ab]{9}")))
    assert len(llm.engine.core.grammars) == 1 and llm.engine.core.grammars.view() is view


def test_each_sample_of_a_call_follows_the_grammar_by_itself(model: LoadedModel) -> None:
    llm = LLM(model, at_default_size({"method": "grammar"}), max_model_len=256)
    params = SamplingParams(
        n=4, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{2}:x+y")
    )
    texts = [sample.text for sample in llm.generate("The code is", params)[0].outputs]
    assert len(set(texts)) > 1 and all(text[:2].isdigit() and text[2:4] == ":x" for text in texts)


def test_every_token_stands_for_the_bytes_that_it_decodes_to(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    view = token_view(tokenizer, model.decoder.config.vocab_size)
    for token in np.random.default_rng(0).integers(0, view.vocab_size, 3000).tolist():
        if not view.tokenizer.is_special_token(token):
            assert view.tokenizer.decode_bytes([token]).decode(errors="replace") == tokenizer.token_text(token)
    text = 'Ünïcode ☃ {"a": [1, 2]}\n\t😀'
    assert view.tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text
    assert set(view.special_tokens) >= {"<|im_start|>", "<|im_end|>"}
