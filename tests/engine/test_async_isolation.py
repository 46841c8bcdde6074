"""`AsyncLLM`: one request cannot end another's stream, and an engine that stops says so to every stream."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline import AsyncLLM, SamplingParams
from paceline.engine import job as engine_job
from paceline.engine.core import EngineCore
from paceline.errors import EngineDeadError, InvalidOptionError, InvalidRequestError, PacelineError, RequestFailedError
from tests.bench.toy_llm import toy_model

SMALL: dict[str, Any] = {"num_kv_blocks": 32, "block_size": 8, "max_num_seqs": 8}
NEIGHBOUR_OPTIONS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


async def text_of(engine: AsyncLLM, params: SamplingParams, prompt: Any = (1, 2, 3)) -> str:
    text = ""
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, params):
        if output.error is not None:
            raise output.error
        text = output.outputs[0].text
    return text


async def beside_a_neighbour(engine: AsyncLLM, params: dict[str, Any]) -> BaseException | str:
    """The neighbour's text must be what it is alone, and the engine must serve afterwards."""
    alone = await text_of(engine, NEIGHBOUR_OPTIONS)
    neighbour = asyncio.create_task(text_of(engine, NEIGHBOUR_OPTIONS))
    await asyncio.sleep(0)
    found: BaseException | str
    try:
        found = await text_of(engine, SamplingParams(**params))
    except PacelineError as error:
        found = error
    assert await neighbour == alone and await text_of(engine, NEIGHBOUR_OPTIONS) == alone
    engine.engine.core.check_integrity()
    return found


def run_beside(params: dict[str, Any], speculative: dict[str, Any] | None = None) -> BaseException | str:
    async def scenario() -> BaseException | str:
        with AsyncLLM(toy_model(), speculative or {"method": "ngram", "node_budget": 4}, **SMALL) as engine:
            return await beside_a_neighbour(engine, params)

    return asyncio.run(scenario())


@pytest.mark.parametrize("temperature", [1e-46, 5e-324, 1e-40])
@pytest.mark.parametrize("method", ["none", "auto"])
def test_a_subnormal_temperature_is_greedy_and_ends_no_other_request(temperature: float, method: str) -> None:
    greedy = run_beside({"temperature": 0.0}, {"method": method})
    assert run_beside({"temperature": temperature}, {"method": method}) == greedy


def test_a_temperature_of_none_is_refused_and_ends_no_other_request() -> None:
    error = run_beside({"temperature": None})
    assert isinstance(error, InvalidOptionError) and "temperature must be a number" in str(error)


def raising(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such state")


def test_a_raising_processor_ends_its_own_stream() -> None:
    error = run_beside({"logits_processors": [raising]})
    assert isinstance(error, RequestFailedError) and "no such state" in str(error)


def test_a_request_that_cannot_be_started_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add_request = EngineCore.add_request

    def picky(core: EngineCore, request: Any) -> Any:
        if request.request_id.endswith("-2") and request.sampling_params.n == 3:  # the last of three samples
            raise LookupError("no detokenizer")
        return add_request(core, request)

    monkeypatch.setattr(EngineCore, "add_request", picky)
    error = run_beside({"n": 3})
    assert isinstance(error, RequestFailedError) and "no detokenizer" in str(error)


def test_an_output_that_cannot_be_made_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    completion = engine_job._completion

    def picky(index: int, state: Any, told: Any) -> Any:
        if state.request.sampling_params.top_k == 5:
            raise OverflowError("no output")
        return completion(index, state, told)

    monkeypatch.setattr(engine_job, "_completion", picky)
    error = run_beside({"top_k": 5, "max_tokens": 50, "ignore_eos": True})
    assert isinstance(error, RequestFailedError) and "no output" in str(error)


def test_an_id_that_another_calls_sample_has_is_refused_and_both_calls_stay_apart() -> None:
    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            two = SamplingParams(temperature=0.0, max_tokens=100, n=2, ignore_eos=True)
            first = engine.generate({"prompt_token_ids": [1, 2]}, two, request_id="call")  # samples call-0 and call-1
            await anext(first)
            with pytest.raises(InvalidRequestError, match="'call-1' is in use"):
                await anext(engine.generate({"prompt_token_ids": [3]}, NEIGHBOUR_OPTIONS, request_id="call-1"))
            lengths = [[len(one.token_ids) for one in output.outputs] async for output in first]
            assert lengths[-1] == [100, 100]
            engine.engine.core.check_integrity()

    asyncio.run(scenario())


@pytest.mark.faults
@pytest.mark.parametrize("error", [RuntimeError("kernel"), MemoryError("full"), SystemExit(3)], ids=repr)
def test_an_engine_that_stops_ends_every_stream_and_says_so(error: BaseException) -> None:
    async def scenario() -> None:
        model = toy_model()
        told: list[tuple[Exception, str]] = []
        died = threading.Event()

        def on_death(death: Exception) -> None:
            told.append((death, threading.current_thread().name))
            died.set()
            raise ValueError("nobody hears this")

        engine = AsyncLLM(model, {"method": "none"}, on_death=on_death, **SMALL)
        stream = engine.generate({"prompt_token_ids": [1, 2, 3]}, NEIGHBOUR_OPTIONS)
        await anext(stream)
        assert engine.death is None

        def broken(*args: object, **options: object) -> object:
            raise error

        model.decoder.forward = broken  # type: ignore[method-assign, assignment]
        for running in (stream, engine.generate({"prompt_token_ids": [4]}, NEIGHBOUR_OPTIONS)):
            with pytest.raises(EngineDeadError, match="internal error"):
                async for _ in running:
                    pass
        assert died.wait(10) and len(told) == 1 and told[0] == (engine.death, "paceline-engine")
        engine.shutdown()

    asyncio.run(scenario())


def test_a_shutdown_is_not_reported_as_a_death() -> None:
    told: list[Exception] = []
    with AsyncLLM(toy_model(), {"method": "none"}, on_death=told.append, **SMALL):
        pass
    assert not told


def test_heavy_options_are_prepared_in_another_thread_than_the_engines_and_the_loops() -> None:
    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            threads: list[str] = []
            make = engine.engine.processor.job

            def job(*args: Any) -> Any:
                threads.append(threading.current_thread().name)
                return make(*args)

            engine.engine.processor.job = job  # type: ignore[method-assign]
            light = await text_of(engine, NEIGHBOUR_OPTIONS)
            stop = [f"never {i}" for i in range(5_000)]
            heavy = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, stop=stop)
            assert await text_of(engine, heavy) == light
            assert threads[0] == threading.current_thread().name
            assert threads[1] not in (threads[0], "paceline-engine")

    asyncio.run(scenario())
