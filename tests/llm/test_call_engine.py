"""`AsyncLLM.call_engine`: work for the engine's thread, answered whatever becomes of the engine."""

import asyncio
import threading
from typing import Any

import pytest

from paceline import AsyncLLM, SamplingParams
from paceline.engine.core import EngineCore
from paceline.errors import EngineDeadError
from tests.bench.toy_llm import toy_model

SMALL: dict[str, Any] = {"num_kv_blocks": 32, "block_size": 4, "max_num_seqs": 8}


def raises(core: EngineCore) -> None:
    raise ValueError("no")


async def beside_a_stream(engine: AsyncLLM) -> list[int]:
    """Calls while a request runs; its tokens."""
    tokens: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": [1, 2, 3]}, params):
        thread = await engine.call_engine(lambda core: threading.current_thread().name)
        assert thread == "paceline-engine"
        tokens = output.outputs[0].token_ids
    return tokens


def test_it_is_done_between_two_steps_and_answers_or_raises() -> None:
    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            assert await engine.call_engine(lambda core: core.kv.block_size) == 4
            with pytest.raises(ValueError, match="no"):
                await engine.call_engine(raises)
            assert len(await beside_a_stream(engine)) == 20, "a call that raises ends no request"
            fingerprint = await engine.call_engine(lambda core: core.exchange.fingerprint)
            assert len(fingerprint.digest) == 16

    asyncio.run(scenario())


def test_a_call_that_waits_for_something_is_done_after_the_step_that_brings_it() -> None:
    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            steps = engine.engine.core.clock

            async def at_step(number: int) -> int:
                return await engine.call_engine(
                    lambda core: core.clock.num_steps, lambda core: steps.num_steps >= number
                )

            waiting = [asyncio.create_task(at_step(number)) for number in (3, 7, 12)]
            cancelled = asyncio.create_task(at_step(5))
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in waiting), "nothing runs yet"
            cancelled.cancel()
            assert len(await beside_a_stream(engine)) == 20
            assert await asyncio.gather(*waiting) == [3, 7, 12]
            assert cancelled.cancelled()

    asyncio.run(scenario())


def test_a_call_that_waits_is_looked_at_again_when_asked_and_raises_what_its_condition_raises() -> None:
    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            is_time = threading.Event()
            waiting = asyncio.create_task(engine.call_engine(lambda core: 5, lambda core: is_time.is_set()))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            is_time.set()
            engine.look_again()
            assert await waiting == 5
            with pytest.raises(ValueError, match="no"):
                await engine.call_engine(lambda core: 5, raises)  # type: ignore[arg-type]
            never = asyncio.create_task(engine.call_engine(lambda core: 5, lambda core: False))
            await asyncio.sleep(0.02)
        with pytest.raises(EngineDeadError):
            await never

    asyncio.run(scenario())


def test_after_the_engine_ended_a_call_says_so() -> None:
    async def scenario() -> None:
        engine = AsyncLLM(toy_model(), {"method": "none"}, **SMALL)
        started = threading.Event()
        go_on = threading.Event()

        def wait(core: EngineCore) -> None:
            started.set()
            go_on.wait(10)

        first = asyncio.create_task(engine.call_engine(wait))
        await asyncio.to_thread(started.wait, 10)
        ending = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await asyncio.sleep(0.05)  # the order to end is in the queue now
        late = asyncio.create_task(engine.call_engine(lambda core: 1))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait_for(first, 10)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(late, 10)
        await ending
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(engine.call_engine(lambda core: 1), 10)

    asyncio.run(scenario())


def test_a_call_that_was_cancelled_before_its_turn_is_not_done() -> None:
    async def scenario() -> None:
        done: list[int] = []
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            go_on = threading.Event()
            first = asyncio.create_task(engine.call_engine(lambda core: go_on.wait(10)))
            await asyncio.sleep(0.05)
            second = asyncio.create_task(engine.call_engine(lambda core: done.append(1)))
            await asyncio.sleep(0.05)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            go_on.set()
            await first
            await engine.call_engine(lambda core: None)
        assert done == []

    asyncio.run(scenario())
