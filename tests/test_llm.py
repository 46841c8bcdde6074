"""The public Python interface on the real model: prompts, streams, chat, cancellation, errors that leave it serving."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import paceline
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import EngineDeadError, InvalidOptionError, InvalidRequestError, ModelLoadError
from paceline.models.loader import LoadedModel

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(smollm2_float32: LoadedModel) -> LLM:
    return LLM(smollm2_float32, {"method": "ngram", "node_budget": 4}, **SMALL)


def test_every_name_in_all_exists() -> None:
    assert all(getattr(paceline, name) is not None for name in paceline.__all__)
    with pytest.raises(AttributeError):
        _ = paceline.nothing_of_this_name  # type: ignore[attr-defined]


def test_prompts_come_in_three_forms(llm: LLM) -> None:
    text = "The capital of France is"
    ids = llm.get_tokenizer().encode(text)
    outputs = llm.generate([text, ids, {"prompt_token_ids": ids}, {"prompt": text}], GREEDY)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert " Paris" in outputs[0].outputs[0].text
    assert llm.generate(text, GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_a_stream_grows_to_the_generated_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n\n"])
    states = list(llm.stream("Count: one, two, three,", params))
    texts = [state.outputs[0].text for state in states]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert states[-1].finished and not states[0].finished
    assert texts[-1] == llm.generate("Count: one, two, three,", params)[0].outputs[0].text


def test_chat_uses_the_template_and_metrics_are_filled(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0, max_tokens=12))
    assert output.outputs[0].text and "<|im_start|>" not in output.outputs[0].text
    metrics = output.metrics
    assert metrics is not None and metrics.ttft_s and metrics.tpot_s and metrics.e2e_s
    assert metrics.num_output_tokens == len(output.outputs[0].token_ids) == len(output.outputs[0].token_sources)
    assert metrics.mean_acceptance_length >= 1.0 and 0.0 <= metrics.draft_acceptance_rate <= 1.0


def test_chat_tells_the_template_of_tools(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    asked = [{"role": "user", "content": "What time is it?"}]
    (output,) = llm.chat(asked, SamplingParams(max_tokens=1), tools=tools, chat_template="{{ tools[0].function.name }}")
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "clock"


def test_n_samples_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8)
    (output,) = llm.generate("My favourite animal is", params)
    texts = [completion.text for completion in output.outputs]
    assert len(texts) == 3 and len(set(texts)) > 1
    alone = llm.generate("My favourite animal is", SamplingParams(temperature=1.0, seed=3, max_tokens=8))
    assert alone[0].outputs[0].text == texts[0], "the first of n is what n=1 gives"


def test_prompt_logprobs_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("The capital of France is", params)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    logprobs = output.outputs[0].token_logprobs
    assert logprobs is not None and [entry.token_id for entry in logprobs] == output.outputs[0].token_ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in logprobs)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ("word " * 600, "context is 512"),
        ([[1, 10**9]], "token ids"),
        ({"prompt_token_ids": [1], "images": []}, "one key"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_is_served(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, GREEDY)
    assert llm.generate("Hello", GREEDY)[0].finished
    llm.engine.core.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"max_tokens": 0},
        {"n": 0},
        {"stop": [""]},
        {"min_tokens": 9, "max_tokens": 8},
        {"logprobs": 1000},
        {"logit_bias": {1: 500.0}},
        {"allowed_token_ids": []},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))):
        SamplingParams(**options)


def test_engine_options_are_checked(smollm2_float32: LoadedModel) -> None:
    for options, message in (
        ({"kv_cache_memory_bytes": 1000}, "too few for one request"),
        ({"num_kv_blocks": 4, "max_model_len": 512}, "too few for one request"),
        ({"max_model_len": 10**6}, "own context"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "needs a row"),
        ({"num_kv_blocks": 4, "kv_cache_memory_bytes": 1 << 20}, "not both"),
    ):
        with pytest.raises(InvalidOptionError, match=message):
            LLM(smollm2_float32, **options)  # type: ignore[arg-type]


def test_unknown_speculative_keys_are_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(InvalidOptionError, match="num_speculative_tokens"):
        LLM("no-such-model", {"method": "ngram", "num_speculative_token": 3})
    with pytest.raises(InvalidOptionError, match="ngram"):
        LLM("no-such-model", {"method": "n-gram"})
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        LLM("no-such-model")


def test_a_request_may_switch_speculation_off(llm: LLM) -> None:
    text = "a b c d a b c d a b c d a b"
    on, off = llm.generate(
        [text, text], [GREEDY, SamplingParams(temperature=0, max_tokens=8, speculative={"off": True})]
    )
    assert on.outputs[0].token_ids == off.outputs[0].token_ids
    assert on.metrics and on.metrics.num_drafts > 0
    assert off.metrics and off.metrics.num_drafts == 0


def test_leaving_a_stream_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.core.has_requests
    assert llm.engine.core.kv.usage == 0.0


def test_interrupt_ends_the_stream_after_a_whole_step(llm: LLM) -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    llm.engine.core.check_integrity()
    assert llm.engine.core.kv.usage == 0.0
    assert llm.generate("Hello", GREEDY)[0].finished


def test_async_streams_run_together_and_can_be_cancelled(smollm2_float32: LoadedModel, llm: LLM) -> None:
    expected = llm.generate(["The capital of France is", "Once upon a"], GREEDY)

    async def collect(engine: AsyncLLM, prompt: str) -> str:
        text = ""
        async for output in engine.generate(prompt, GREEDY):
            text = output.outputs[0].text
        return text

    async def scenario() -> None:
        with AsyncLLM(smollm2_float32, {"method": "ngram", "node_budget": 4}, **SMALL) as engine:
            long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            endless = asyncio.create_task(_drain(engine, long))
            texts = await asyncio.gather(*(collect(engine, p) for p in ("The capital of France is", "Once upon a")))
            assert texts == [output.outputs[0].text for output in expected]
            assert not endless.done()
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            for _ in range(100):
                if engine.engine.core.kv.usage == 0.0:
                    break
                await asyncio.sleep(0.05)
            assert engine.engine.core.kv.usage == 0.0
            with pytest.raises(InvalidRequestError):
                await collect(engine, "")
            last = asyncio.create_task(_drain(engine, long))
            await asyncio.sleep(0.3)
        with pytest.raises(EngineDeadError):
            await last

    asyncio.run(scenario())


async def _drain(engine: AsyncLLM, params: SamplingParams) -> None:
    async for _ in engine.generate("Once upon a time", params):
        pass


def test_help_is_quick_and_needs_no_torch() -> None:
    script = "import sys; from paceline.cli.main import _parser; _parser(None); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
