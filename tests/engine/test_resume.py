"""A request that goes on after tokens which an earlier attempt delivered, on another engine: exactly what it would have
said, at whatever token it was cut off."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, LLMEngine, SamplingParams
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.errors import InvalidRequestError
from paceline.sampling_params import StructuredOutputsParams
from tests.bench.toy_llm import toy_model
from tests.toy import ToyTokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SMALL: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 1.2, "seed": 7, "ignore_eos": True},
    "penalties": {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 9},
    "presence": {"temperature": 0.0, "presence_penalty": 1.1, "ignore_eos": True},
    "bad words": {"temperature": 0.0, "bad_words": ["ab", "q"], "ignore_eos": True},
    "min_tokens": {"temperature": 1.0, "seed": 2, "min_tokens": 9, "stop_token_ids": [1, 2, 3, 4]},
    "stop": {"temperature": 1.5, "seed": 4, "stop": ["ab", "k", "sx"], "min_tokens": 6},
    "kept stop": {"temperature": 1.5, "seed": 4, "stop": ["k", "xy"], "include_stop_str_in_output": True},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 1, "ignore_eos": True},
    "grammar": {
        "temperature": 1.0,
        "seed": 3,
        "structured_outputs": StructuredOutputsParams(regex="(abc|bca|cab){2,5}e"),
    },
}


def make(method: str = "none") -> LLM:
    return LLM(toy_model(), {"method": method}, **SMALL)


def params(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "logprobs": 2} | OPTIONS[name] | more)


def resume(llm: LLM, options: SamplingParams, delivered: Any) -> RequestOutput:
    prompt = {"prompt_token_ids": PROMPT, "output_token_ids": delivered}
    [output] = llm.generate(prompt, options)
    llm.engine.core.check_integrity()
    return output


def deltas(llm: LLM, options: SamplingParams) -> list[RequestOutput]:
    return list(llm.stream(PROMPT, options, output_kind=RequestOutputKind.DELTA))


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "recycling", "auto"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_rest_is_the_same_wherever_the_first_attempt_was_cut_off(name: str, method: str) -> None:
    options = params(name)
    whole = deltas(make(), options)
    tokens = [token for delta in whole for token in delta.outputs[0].token_ids]
    logprobs = [entry for delta in whole for entry in delta.outputs[0].token_logprobs or ()]
    end = whole[-1].outputs[0]
    llm = make(method)
    for cut in range(1, len(tokens), 1 if method == "none" else 5):
        told = "".join(delta.outputs[0].text for delta in whole if delta.outputs[0].offset < cut)
        output = resume(llm, options, tokens[:cut])
        rest = output.outputs[0]
        assert rest.token_ids == tokens[cut:] and rest.offset == cut
        assert rest.token_logprobs == logprobs[cut:], "bit for bit"
        assert told + rest.text == "".join(delta.outputs[0].text for delta in whole)
        assert (rest.finish_reason, rest.stop_reason) == (end.finish_reason, end.stop_reason)
        assert output.prompt_token_logprobs == whole[-1].prompt_token_logprobs
        assert len(rest.token_sources) == len(rest.token_ids)
        assert (output.num_cached_tokens or 0) <= len(PROMPT)


@pytest.mark.parametrize("name", OPTIONS)
def test_after_its_last_token_a_request_ends_at_once_and_says_why(name: str) -> None:
    options = params(name)
    [output] = make().generate(PROMPT, options)
    whole = output.outputs[0]
    llm = make()
    again = resume(llm, options, whole.token_ids)
    rest = again.outputs[0]
    assert again.finished and (rest.token_ids, rest.text, rest.offset) == ([], "", len(whole.token_ids))
    assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert llm.engine.core.clock.num_steps == 0 and not llm.engine.core.has_requests


class Pieces(ToyTokenizer):
    """Tokens are single bytes, many of them parts of longer characters."""

    BYTES = "é€😀".encode() + b"abcdefghijklmnopqrst"

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(self.BYTES[token] for token in token_ids).decode(errors="replace")


@pytest.mark.parametrize("seed", range(3))
def test_half_a_character_at_the_cut_is_neither_lost_nor_told_twice(seed: int) -> None:
    model = replace(toy_model(), tokenizer=Pieces())  # type: ignore[arg-type]
    options = SamplingParams(temperature=1.5, seed=seed, max_tokens=24, ignore_eos=True, stop=["é", "ab", "€"])
    whole = deltas(LLM(model, {"method": "none"}, **SMALL), options)
    tokens = [token for delta in whole for token in delta.outputs[0].token_ids]
    llm = LLM(model, {"method": "ngram", "node_budget": 4}, **SMALL)
    for cut in range(1, len(tokens)):
        told = "".join(delta.outputs[0].text for delta in whole if delta.outputs[0].offset < cut)
        rest = resume(llm, options, tokens[:cut]).outputs[0]
        assert told + rest.text == "".join(delta.outputs[0].text for delta in whole)
        assert rest.token_ids == tokens[cut:]


def test_deltas_say_how_many_tokens_stand_before_them() -> None:
    num_told = 0
    for delta in deltas(make("ngram"), params("greedy")):
        assert delta.outputs[0].offset == num_told
        num_told += len(delta.outputs[0].token_ids)
    prompt = {"prompt_token_ids": PROMPT, "output_token_ids": [1, 2]}
    offsets = [
        d.outputs[0].offset for d in make().stream(prompt, params("greedy"), output_kind=RequestOutputKind.DELTA)
    ]
    assert offsets == [*range(2, 16)]
    offsets = [d.outputs[0].offset for d in make().stream(prompt, params("greedy"))]
    assert offsets == [2] * 14


def test_every_sample_of_a_call_goes_on_after_its_own_tokens() -> None:
    options = params("seeded", n=3)
    [whole] = make().generate(PROMPT, options)
    tokens = [sample.token_ids for sample in whole.outputs]
    output = resume(make(), options, [tokens[0][:5], [], tokens[2]])
    assert [sample.token_ids for sample in output.outputs] == [tokens[0][5:], tokens[1], []]
    assert [sample.offset for sample in output.outputs] == [5, 0, 16]
    assert output.finished


@pytest.mark.parametrize(
    ("delivered", "n", "message"),
    [
        ([24], 1, "from 0 to 23"),
        ([1.5], 1, "output_token_ids must be whole numbers"),
        ("ab", 1, "a list of token ids"),
        ([1], 2, "a list of 2 lists"),
        ([[1], [2], [3]], 2, "a list of 2 lists"),
        ([1] * 17, 1, "token 16 of 17, which ends the output"),
    ],
)
def test_tokens_that_cannot_have_been_delivered_are_refused(delivered: Any, n: int, message: str) -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match=message):
        resume(llm, params("greedy", n=n), delivered)
    assert not llm.engine.core.has_requests
    llm.engine.core.check_integrity()


def test_nothing_delivered_is_a_request_like_any_other() -> None:
    [plain] = make().generate(PROMPT, params("seeded"))
    for nothing in ([], None):
        assert resume(make(), params("seeded"), nothing).outputs[0].token_ids == plain.outputs[0].token_ids


async def collected(engine: AsyncLLM, delivered: Sequence[int], kind: RequestOutputKind) -> list[RequestOutput]:
    prompt = {"prompt_token_ids": PROMPT, "output_token_ids": list(delivered)}
    return [output async for output in engine.generate(prompt, params("seeded"), output_kind=kind)]


def test_streams_of_a_resumed_request_bring_what_is_new() -> None:
    [whole] = make().generate(PROMPT, params("seeded"))
    tokens = whole.outputs[0].token_ids

    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "ngram", "node_budget": 4}, **SMALL) as engine:
            for kind in RequestOutputKind:
                outputs = await collected(engine, tokens[:6], kind)
                new = [token for output in outputs for token in output.outputs[0].token_ids]
                assert (new if kind is RequestOutputKind.DELTA else outputs[-1].outputs[0].token_ids) == tokens[6:]
                assert outputs[0].outputs[0].offset == 6
                ended = await asyncio.wait_for(collected(engine, tokens, kind), 10)
                assert ended[-1].finished and ended[-1].outputs[0].finish_reason == "length"
                assert ended[-1].outputs[0].token_ids == []
        engine.check_integrity()

    asyncio.run(scenario())


def test_an_engine_stepped_by_hand_reports_a_request_that_had_ended() -> None:
    engine = LLMEngine(make())
    [whole] = make().generate(PROMPT, params("greedy"))
    tokens = whole.outputs[0].token_ids
    engine.add_request("r", {"prompt_token_ids": PROMPT, "output_token_ids": tokens}, params("greedy"))
    [output] = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert not engine.has_unfinished_requests()
