"""What vLLM's users call: the same names, arguments, defaults and shapes of what comes out."""

import asyncio
import inspect
import logging
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from paceline.core.foreign_options import ENGINE
from paceline.engine.arg_utils import OWN
from paceline.errors import EngineDeadError, InvalidOptionError
from paceline.llm.metrics import Counter, Gauge, Histogram, Vector
from paceline.outputs import Logprob
from paceline.sampling_params import RequestOutputKind
from tests.bench.toy_llm import toy_model
from tests.toy import VOCAB

SMALL: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 16, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(toy_model(), {"method": "ngram", "node_budget": 4}, **SMALL)


def test_log_probabilities_are_dictionaries_with_rank_and_text(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("abc", params)
    (one,) = output.outputs
    assert one.logprobs is not None and len(one.logprobs) == 5
    for token, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(entry)) == token and 2 <= len(entry) <= 3
        assert all(isinstance(value, Logprob) for value in entry.values())
        assert {1, 2} <= {value.rank for value in entry.values()}
        assert entry[token].decoded_token == chr(ord("a") + token)
    assert one.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True))
    )
    assert one.logprobs is one.logprobs, "made once"
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == [1, 2]
    assert llm.generate("abc", GREEDY)[0].outputs[0].logprobs is None


def test_all_log_probabilities_of_the_vocabulary(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=2, logprobs=-1))
    assert output.outputs[0].logprobs is not None
    assert all(len(entry) == VOCAB for entry in output.outputs[0].logprobs)


def test_deltas_carry_the_log_probability_of_all_tokens_so_far(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, output_kind=RequestOutputKind.DELTA)
    deltas = [delta.outputs[0] for delta in llm.stream("abc", params)]
    assert len(deltas) > 1 and sum(len(delta.token_ids) for delta in deltas) == 6
    params.output_kind = RequestOutputKind.CUMULATIVE
    assert deltas[-1].cumulative_logprob == llm.generate("abc", params)[0].outputs[0].cumulative_logprob


def test_without_detokenizing_there_is_no_text(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY)[0].outputs[0]
    params = GREEDY.clone()
    params.detokenize = False
    bare = llm.generate("abc", params)[0].outputs[0]
    assert whole.text and not bare.text and bare.token_ids == whole.token_ids


def test_options_changed_after_a_call_hold_for_the_next_one_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    job = llm.submit("abc", params)
    params.max_tokens = 6
    while not job.finished:
        llm.step()
    assert len(job.output().outputs[0].token_ids) == 3
    assert len(llm.generate("abc", params)[0].outputs[0].token_ids) == 6


def test_prompts_as_vllms_dictionaries(llm: LLM) -> None:
    text, tokens = TextPrompt(prompt="abc"), TokensPrompt(prompt_token_ids=[0, 1, 2], prompt="abc")
    images = {"prompt_token_ids": [0, 1, 2], "multi_modal_data": None}
    outputs = llm.generate([text, tokens, images], GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["abc", "abc", None]


def test_metrics_have_vllms_names_and_moments(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = list(range(1, 10)) * 5
    assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 32]
    assert llm.reset_prefix_cache(reset_running_requests=True)
    (output,) = llm.generate(prompt, GREEDY)
    assert output.num_cached_tokens == 0 and output.metrics is not None
    moments = output.metrics
    assert moments.arrival_s == moments.queued_ts <= moments.scheduled_ts < moments.first_token_ts
    assert moments.first_token_ts <= moments.last_token_ts and moments.num_generation_tokens == 8
    llm.engine.core.check_integrity()


def test_get_metrics_counts_what_has_ended() -> None:
    llm = LLM(toy_model(), {"method": "ngram", "num_speculative_tokens": 3}, **SMALL)
    llm.generate(["abcabc", "dd"], GREEDY)
    found = {metric.name: metric for metric in llm.get_metrics()}
    tokens, running = found["paceline:generation_tokens"], found["paceline:num_requests_running"]
    assert isinstance(tokens, Counter) and tokens.value == 16
    assert isinstance(running, Gauge) and running.value == 0
    length = found["paceline:request_prompt_tokens"]
    assert isinstance(length, Histogram) and (length.count, length.sum) == (2, 8)
    assert (length.buckets["2"], length.buckets["5"], length.buckets["10"], length.buckets["+Inf"]) == (1, 1, 2, 2)
    accepted, by_depth = (
        found["paceline:spec_decode_num_accepted_tokens"],
        found["paceline:spec_decode_num_accepted_tokens_per_pos"],
    )
    assert isinstance(accepted, Counter) and isinstance(by_depth, Vector) and sum(by_depth.values) == accepted.value


class Bar:
    def __init__(self, total: int, desc: str) -> None:
        self.total, self.done, self.closed = total, 0, False
        BARS.append(self)

    def update(self, n: int = 1) -> None:
        self.done += n

    def close(self) -> None:
        self.closed = True


BARS: list[Bar] = []


def test_a_progress_bar_is_told_of_every_prompt(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["abc", "d", "e"], GREEDY, use_tqdm=Bar)
    (bar,) = BARS
    assert (bar.total, bar.done, bar.closed) == (3, 3, True)
    llm.generate("abc", GREEDY)
    assert capsys.readouterr().err == "", "no bar where nobody looks"


def test_arguments_that_ask_for_nothing_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        LLM(toy_model(), tensor_parallel_size=1, gpu_memory_utilization=0.5, disable_log_stats=None, **SMALL)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "tensor_parallel_size" in line and "gpu_memory_utilization" in line and "disable_log_stats" not in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "one device"),
        ({"enable_lora": True}, "adapters"),
        ({"tokenizer": "other"}, "model's folder"),
        ({"max_num_seq": 3}, "from-vllm"),
        ({"tensor_paralel_size": 1}, "Did you mean 'tensor_parallel_size'"),
        ({"num_kv_blocks": 4, "num_gpu_blocks_override": 4}, "give one"),
    ],
    ids=str,
)
def test_arguments_that_ask_for_something_are_refused_before_a_model_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        LLM("no-such-model", **options)


def test_engine_args_are_the_options_of_an_engine() -> None:
    own = [name for name in inspect.signature(LLM.__init__).parameters if name not in ("self", "others")]
    assert sorted(OWN) == sorted(own), "engine/arg_utils.py lists LLM's options"
    parser = EngineArgs.add_cli_args(ArgumentParser())
    words = "--model toy -tp 1 --enforce-eager --max-num-seqs 4 --no-enable-chunked-prefill --seed 7"
    args = EngineArgs.from_cli_args(parser.parse_args(words.split()))
    assert args.given() == {
        "model": "toy", "tensor_parallel_size": 1, "enforce_eager": True, "max_num_seqs": 4,
        "enable_chunked_prefill": False, "seed": 7, "quantization": "auto",
    }  # fmt: skip
    assert set(vars(EngineArgs())) == {*OWN, *ENGINE}
    with pytest.raises(TypeError):
        EngineArgs(max_num_seq=4)


def test_an_engine_that_is_stepped_by_hand() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=toy_model(), **SMALL))
    engine.add_request("a", "abc", GREEDY)
    engine.add_request("b", "dd", SamplingParams(n=2, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("c", "abc", LONG)
    outputs: list[RequestOutput] = []
    while engine.get_num_unfinished_requests() > 1:
        outputs += engine.step()
    engine.abort_request(["c"])
    assert not engine.has_unfinished_requests()
    finished = {output.request_id: output for output in outputs if output.finished}
    assert set(finished) == {"a", "b"} and [output.request_id for output in outputs].count("b") == 1
    assert len(finished["b"].outputs) == 2
    assert (
        finished["a"].outputs[0].token_ids == LLM(toy_model(), **SMALL).generate("abc", GREEDY)[0].outputs[0].token_ids
    )


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_the_async_engine_aborts_pauses_and_says_whether_it_lives() -> None:
    assert AsyncLLMEngine is AsyncLLM

    async def scenario() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=toy_model(), enforce_eager=True, **SMALL))
        await engine.check_health()
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        deltas = await collect(engine.generate("abc", params, "one"))
        assert sum(len(delta.outputs[0].token_ids) for delta in deltas) == 8
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        waiting = asyncio.create_task(collect(engine.generate("abc", LONG, "two")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.abort("two")
        (ended,) = await waiting
        assert ended.finished and ended.outputs[0].finish_reason == "abort"
        third = asyncio.create_task(collect(engine.generate("abc", GREEDY, "three")))
        await asyncio.sleep(0.05)
        assert not third.done()
        await engine.resume_generation()
        assert len((await third)[-1].outputs[0].token_ids) == 8
        assert await engine.reset_prefix_cache()
        engine.shutdown()
        engine.check_integrity()
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    asyncio.run(scenario())


def test_the_models_own_sampling_defaults_hold_where_nothing_is_given(tmp_path: Path) -> None:
    import dataclasses

    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 7, "do_sample": true}')
    model = dataclasses.replace(toy_model(), path=tmp_path)
    llm = LLM(model, **SMALL)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=7)
    assert llm.submit("abc").requests[0].sampling_params.temperature == 0.6
    assert LLM(model, generation_config="vllm", **SMALL).get_default_sampling_params() == SamplingParams()
    changed = LLM(model, override_generation_config={"max_new_tokens": 5, "top_k": 3}, **SMALL)
    assert changed.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=3, max_tokens=5)
    elsewhere = LLM(toy_model(), generation_config=str(tmp_path), **SMALL)
    assert elsewhere.get_default_sampling_params().top_k == 7
    for name in ("temprature", "do_sample", "eos_token_id"):
        with pytest.raises(InvalidOptionError, match=f"override_generation_config takes no '{name}'"):
            LLM(model, override_generation_config={name: 1}, **SMALL)


def test_a_profile_is_written_where_one_was_asked_for(tmp_path: Path) -> None:
    llm = LLM(toy_model(), profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)}, **SMALL)
    llm.start_profile()
    llm.generate("abc", GREEDY)
    llm.stop_profile()
    (trace,) = tmp_path.glob("*.json")
    assert trace.stat().st_size > 1000
    with pytest.raises(InvalidOptionError, match="profiler_config"):
        LLM(toy_model(), **SMALL).start_profile()
