"""Readers are told at once of first tokens and ends, and of the rest as often as they can take it; nothing is lost."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline import AsyncLLM, SamplingParams
from paceline.core.outputs import RequestOutputKind
from paceline.llm import delivery, output_stream
from paceline.llm.delivery import MAX_REST_S, REST, Delivery
from paceline.llm.output_stream import News, OutputStream
from tests.bench.toy_llm import toy_model

SMALL: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 8}


class State:
    def __init__(self) -> None:
        self.request = self
        self.finished = False


class Stream:
    """As much of an `OutputStream` as a delivery looks at."""

    loop = object()

    def __init__(self) -> None:
        self.state = State()
        self.job = self
        self.states = [self.state]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], Callable[[float], None]]]:
    calls: list[tuple[list[Any], Callable[[float], None]]] = []

    def post(loop: object, news: list[tuple[Any, News]], when_read: Callable[[float], None]) -> None:
        calls.append(([stream for stream, _ in news], when_read))

    monkeypatch.setattr(delivery, "post", post)
    return calls


def test_first_tokens_and_ends_are_told_at_once_and_the_rest_after_a_rest(posted: list[Any]) -> None:
    clock = [0.0]
    told: Any = Delivery(lambda job: job, clock=lambda: clock[0])  # type: ignore[arg-type,return-value]
    one, two = Stream(), Stream()
    told.follow(one)
    told.note([one.state])
    assert posted.pop()[0] == [one]
    told.note([one.state])
    assert not posted, "nobody has read the first one yet"
    told.follow(two)
    told.note([one.state, two.state])
    streams, when_read = posted.pop()
    assert streams == [two], "its first token"
    when_read(0.001)
    clock[0] = REST * 0.001 - 1e-6
    told.note([one.state])
    assert not posted
    clock[0] += 2e-6
    told.note([two.state])
    assert {id(stream) for stream in posted.pop()[0]} == {id(one), id(two)}, "all that waited"
    one.state.finished = True
    told.note([one.state, two.state])
    assert posted.pop()[0] == [one], "its end"
    told.flush()
    assert posted.pop()[0] == [two]
    told.flush()
    assert not posted, "there is no more to tell"


def test_no_reader_is_waited_for_longer_than_a_film_waits_for_its_next_picture(posted: list[Any]) -> None:
    clock = [0.0]
    told: Any = Delivery(lambda job: job, clock=lambda: clock[0])  # type: ignore[arg-type,return-value]
    one = Stream()
    told.follow(one)
    told.note([one.state])
    posted.pop()[1](60.0)  # a loop that was stuck for a minute
    clock[0] = 1.01 * MAX_REST_S
    told.note([one.state])
    assert posted.pop()[0] == [one]


def test_who_has_left_is_told_nothing(posted: list[Any]) -> None:
    told: Any = Delivery(lambda job: job)  # type: ignore[arg-type,return-value]
    one = Stream()
    told.follow(one)
    told.note([one.state])
    posted.clear()
    told.note([one.state])
    told.forget(one)
    told.flush()
    told.note([one.state])
    assert not posted


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_slow_readers_get_every_token_once(kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes so long over every output that deliveries rest."""
    put = OutputStream.put

    def slow(self: OutputStream, news: News) -> None:
        time.sleep(0.002)
        put(self, news)

    monkeypatch.setattr(output_stream.OutputStream, "put", slow)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    async def read(engine: AsyncLLM, first: int) -> tuple[list[int], int]:
        tokens: list[int] = []
        count = 0
        async for output in engine.generate({"prompt_token_ids": [first, 2, 3]}, params, output_kind=kind):
            new = output.outputs[0].token_ids
            tokens = [*tokens, *new] if kind is RequestOutputKind.DELTA else new
            count += 1
        return tokens, count

    async def scenario() -> None:
        with AsyncLLM(toy_model(), {"method": "none"}, **SMALL) as engine:
            together = await asyncio.gather(*(read(engine, first) for first in range(1, 5)))
            monkeypatch.setattr(output_stream.OutputStream, "put", put)
            for first, (tokens, count) in enumerate(together, 1):
                assert len(tokens) == 60 and tokens == (await read(engine, first))[0]
                assert count < 60, "outputs were meant to merge"

    asyncio.run(scenario())
