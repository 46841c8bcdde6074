"""A cluster of fake engines: whatever dies, stalls, lies or comes late, every client gets exactly its answer."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline.cluster.delivery import Delivery, OutOfStepError
from paceline.cluster.fetch import PREFILL_BATCH
from paceline.cluster.ingress import Ingress
from paceline.cluster.policy import make_policy
from paceline.cluster.router import NoWorkerError
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidRequestError
from tests.cluster.fake_engine import BLOCK, FakeEngine, answer, routing_keys
from tests.cluster.rig import Node, Rig, cluster, prompts

PROMPT = prompts(1, 6 * BLOCK + 5)[0]


def test_answers_come_as_from_one_engine() -> None:
    async def run() -> None:
        async with cluster("decode") as rig:
            found = await rig.ask(PROMPT, n=3, logprobs=1, max_tokens=9)
            params = SamplingParams(max_tokens=9, seed=7)
            total = 0.0
            for one in answer(PROMPT, params, sample=2):
                total += -one / 7
            assert found["cumulative"][2] == total
            await rig.settled()

    asyncio.run(run())


def test_a_request_without_a_seed_gets_one_from_the_ingress() -> None:
    """The fake engine asserts it."""

    async def run() -> None:
        async with cluster("decode") as rig:
            tokens = 0
            async for output in rig.ingress.generate(PROMPT, SamplingParams(max_tokens=6), "r", ""):
                tokens += sum(len(sample.token_ids) for sample in output.outputs)
            assert tokens == 6

    asyncio.run(run())


def test_an_invalid_request_is_told_as_by_one_engine() -> None:
    async def run() -> None:
        async with cluster("decode") as rig:
            with pytest.raises(InvalidRequestError, match="this prompt is refused"):
                await rig.ask([999, 1])
            await rig.ask(PROMPT)
            await rig.settled()

    asyncio.run(run())


def test_closing_a_stream_aborts_it_on_the_worker() -> None:
    async def run() -> None:
        async with cluster("decode", step_s=0.01) as rig:
            outputs = rig.ingress.generate(PROMPT, SamplingParams(max_tokens=4000, seed=1), "r", "")
            await anext(outputs)
            await outputs.aclose()  # type: ignore[attr-defined]
            await rig.settled()

    asyncio.run(run())


def test_closing_a_stream_aborts_its_prompt_on_the_prefill_worker() -> None:
    async def run() -> None:
        async with cluster("prefill", "decode", step_s=60.0, chunk_blocks=2) as rig:
            asking = asyncio.create_task(rig.ask(PROMPT))
            while not rig.node("prefill0").engine.running:
                await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await rig.settled()

    asyncio.run(run())


def test_a_prefill_worker_computes_the_prompt_and_the_decode_worker_only_its_last_rows() -> None:
    async def run() -> None:
        async with cluster("prefill", "decode") as rig:
            found = await rig.ask(PROMPT)
            assert found["cached"] == 6 * BLOCK
            assert rig.node("prefill0").engine.num_computed_tokens == 6 * BLOCK + 1  # a drafter's last row needs it
            assert rig.node("decode1").engine.num_computed_tokens == 5
            assert rig.ingress.placer.placed[-1].prefill_worker_id == "prefill0"
            while rig.ingress.placer.decode.num_held("decode1") < 6:
                await asyncio.sleep(0.005)
            await rig.ask([*PROMPT, 1])  # now it is cached here: nothing to do there
            placed = rig.ingress.placer.placed[-1]
            assert (placed.prefill_worker_id, placed.reason) == (None, "all of it is cached here")
            await rig.settled()

    asyncio.run(run())


def test_events_lead_the_next_prompt_to_the_worker_that_has_its_prefix() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", "decode") as rig:
            await rig.ask(PROMPT)
            first = rig.ingress.placer.placed[-1].worker_id
            await asyncio.sleep(0.05)
            for i in range(6):
                found = await rig.ask([*PROMPT, i])
                assert rig.ingress.placer.placed[-1].worker_id == first and found["cached"] == 6 * BLOCK

    asyncio.run(run())


Hurt = Callable[[Rig], None]


def kill_in_step(name: str, at: int) -> Hurt:
    """Kill that worker in the first step in which a request has `at` tokens or more."""

    def hurt(rig: Rig) -> None:
        node = rig.node(name)

        def on_step(request_id: str, num_tokens: int) -> None:
            if num_tokens >= at:
                node.engine.on_step = None
                node.kill_soon()

        node.engine.on_step = on_step

    return hurt


def kill_at(name: str, method: str) -> Hurt:
    """Kill that worker when its engine is asked for that."""

    def hurt(rig: Rig) -> None:
        node = rig.node(name)
        original = getattr(node.engine, method)

        async def first(*arguments: Any) -> Any:
            setattr(node.engine, method, original)
            node.kill_soon()
            await asyncio.sleep(0.02)
            return await original(*arguments)

        setattr(node.engine, method, first)

    return hurt


def kill_in_chunk(name: str, at: int) -> Hurt:
    """Kill that worker when so many blocks of a prompt are computed, and more are to be."""

    def hurt(rig: Rig) -> None:
        node = rig.node(name)

        def on_chunk(request_id: str, num_blocks: int) -> None:
            if num_blocks >= at:
                node.engine.on_chunk = None
                node.kill_soon()

        node.engine.on_chunk = on_chunk

    return hurt


POINTS: dict[str, Hurt] = {
    "prefill worker, while it computes": kill_in_step("prefill0", 0),
    "prefill worker, before export": kill_at("prefill0", "pin"),
    "prefill worker, in mid-transfer": kill_at("prefill0", "read"),
    "decode worker, before commit": kill_at("decode1", "commit"),
    "decode worker, while it writes": kill_at("decode1", "write"),
    "decode worker, before the first token": kill_in_step("decode1", 0),
    "decode worker, in mid-stream": kill_in_step("decode1", 10),
    "decode worker, before the last token": kill_in_step("decode1", 18),
}


CHUNKED: dict[str, Hurt] = {  # while blocks travel
    "prefill worker, after the first chunk": kill_in_chunk("prefill0", 1),
    "prefill worker, before the last chunk": kill_in_chunk("prefill0", 30),
    "decode worker, while it writes": kill_at("decode1", "write"),
    "decode worker, when the first block comes": kill_at("decode1", "reserve"),
    "decode worker, before commit": kill_at("decode1", "commit"),
}


@pytest.mark.parametrize("point", CHUNKED)
def test_a_worker_that_dies_while_a_prompt_is_computed_and_fetched_changes_no_answer(point: str) -> None:
    async def run() -> None:
        long = prompts(1, 40 * BLOCK + 3)[0]
        async with cluster("prefill", "decode", "decode", router="round_robin", step_s=0.005, chunk_blocks=5) as rig:
            CHUNKED[point](rig)
            await rig.ask(long, logprobs=0)
            assert [node.name for node in rig.nodes if node.worker is None] == [
                "prefill0" if point.startswith("prefill") else "decode1"
            ]
            await rig.ask(long, "again")
            await rig.settled()

    asyncio.run(run())


def test_blocks_come_while_the_rest_of_the_prompt_is_computed() -> None:
    async def run() -> None:
        long = prompts(1, 40 * BLOCK + 3)[0]
        async with cluster("prefill", "decode", step_s=0.02, chunk_blocks=16) as rig:
            prefill, decode, seen = rig.node("prefill0").engine, rig.node("decode1").engine, list[int]()
            write = decode.write

            async def noted(ticket: Any, blocks: Any) -> list[bool]:
                seen.append(len(prefill.blocks))
                return await write(ticket, blocks)

            decode.write = noted  # type: ignore[method-assign]
            found = await rig.ask(long)
            assert found["cached"] == 40 * BLOCK and decode.num_computed_tokens == 3
            assert seen[0] < 40, "nothing was written before the prompt was whole"
            await rig.settled()

    asyncio.run(run())


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_worker_that_dies_at_any_point_changes_no_answer(point: str, n: int) -> None:
    async def run() -> None:
        long = prompts(1, (PREFILL_BATCH + 4) * BLOCK + 3)[0]
        async with cluster("prefill", "decode", "decode", router="round_robin") as rig:
            POINTS[point](rig)
            await rig.ask(long, n=n, logprobs=0)
            await rig.ask(long, "again", n=n)
            await rig.settled()

    asyncio.run(run())


SECONDS: dict[str, Hurt] = {
    "the prefill worker, while it computes for the recovery": kill_in_step("prefill0", 0),
    "the prefill worker, in the recovery's transfer": kill_at("prefill0", "read"),
    "the next decode worker, before commit": kill_at("decode2", "commit"),
    "the next decode worker, before its first token": kill_in_step("decode2", 0),
    "the next decode worker, in mid-stream": kill_in_step("decode2", 14),
}


@pytest.mark.parametrize("second", SECONDS)
def test_a_second_worker_that_dies_during_recovery_changes_no_answer(second: str) -> None:
    async def run() -> None:
        long = prompts(1, (PREFILL_BATCH + 4) * BLOCK + 3)[0]
        async with cluster("prefill", "decode", "decode", "decode", router="round_robin") as rig:
            prefill = rig.node("prefill0")

            def hurt_next(request_id: str, num_tokens: int) -> None:
                if num_tokens >= 10:
                    rig.node("decode1").engine.on_step = None
                    prefill.engine.blocks.clear()  # so that it computes again
                    SECONDS[second](rig)
                    rig.node("decode1").kill_soon()

            rig.node("decode1").engine.on_step = hurt_next
            await rig.ask(long, logprobs=0)
            killed = [node.name for node in rig.nodes if node.worker is None]
            assert len(killed) == 2, killed
            assert rig.ingress.num_resumed == (2 if "decode2" in killed else 1)
            await rig.settled()

    asyncio.run(run())


def test_how_long_a_stream_stood_still_is_measured_from_its_last_item() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", router="round_robin", step_s=0.02) as rig:
            kill_in_step("decode0", 10)(rig)
            await rig.ask(PROMPT)
            [recovery] = rig.ingress.recoveries
            assert 0.02 <= recovery.gap_s < 2.0
            assert recovery.reason == "the other side closed the connection"

    asyncio.run(run())


def test_the_only_worker_may_die_and_come_back() -> None:
    async def run() -> None:
        async with cluster("decode", step_s=0.002) as rig:
            node = rig.node("decode0")
            kill_in_step("decode0", 6)(rig)
            asking = asyncio.create_task(rig.ask(PROMPT))
            while node.worker is not None:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            await node.start()
            await asking
            assert rig.ingress.num_resumed == 1
            await rig.settled()

    asyncio.run(run())


def test_a_worker_that_stalls_is_given_up_and_what_it_says_later_is_not_taken() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", router="round_robin", stall_timeout_s=0.2) as rig:
            node = rig.node("decode0")
            await rig.ask(PROMPT, max_tokens=4)  # the first turn
            stalled, gate = rig.node("decode1"), asyncio.Event()
            assert stalled.worker is not None
            session = next(iter(stalled.worker.sessions))
            send = session._channel.send

            async def late(frame: Any) -> None:
                await gate.wait()
                await send(frame)

            session._channel.send = late  # type: ignore[method-assign]
            await rig.ask(PROMPT, "stalls")
            assert rig.ingress.placer.placed[-1].worker_id == node.name and rig.ingress.placer.placed[-1].attempt == 2
            gate.set()
            await rig.all_up()  # it joins again
            await rig.ask(PROMPT, "after")
            await rig.settled()

    asyncio.run(run())


def test_a_worker_that_leaves_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", router="round_robin", step_s=0.01) as rig:
            asking = asyncio.create_task(rig.ask(PROMPT, "old", max_tokens=60))
            worker = rig.node("decode0").worker
            assert worker is not None
            while not rig.node("decode0").engine.running:
                await asyncio.sleep(0.005)
            draining = asyncio.create_task(worker.drain(10.0, "told to leave"))
            while rig.ingress.placer.decode.worker_ids != ["decode1"]:
                await asyncio.sleep(0.005)
            await asyncio.gather(*(rig.ask(PROMPT, f"new{i}") for i in range(3)))
            assert not worker.stopped.is_set() and {one.worker_id for one in list(rig.ingress.placer.placed)[1:]} == {
                "decode1"
            }
            await asking
            await draining
            assert worker.stopped.is_set() and rig.ingress.num_resumed == 0

    asyncio.run(run())


def test_an_engine_that_dies_stops_its_worker_and_not_the_request() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", router="round_robin") as rig:
            node = rig.node("decode0")
            worker = node.worker
            assert worker is not None

            def on_step(request_id: str, num_tokens: int) -> None:
                node.engine.is_dead = num_tokens >= 8

            node.engine.on_step = on_step
            asking = asyncio.create_task(rig.ask(PROMPT))
            await worker.stopped.wait()
            assert "the engine died" in worker.reason
            await node.kill()  # its process ends
            await asking

    asyncio.run(run())


def test_a_worker_with_another_fingerprint_is_refused_with_the_reason() -> None:
    async def run() -> None:
        async with cluster("decode") as rig:
            other = Node(FakeEngine(fingerprint={"weights": "w", "kernels": "avx2"}), "decode", "stranger")
            await other.start()
            assert other.worker is not None
            joining = Ingress(
                [("127.0.0.1", other.port)],
                rig.ingress.placer.decode,
                rig.ingress.placer.prefill,
                make_policy("local"),
                routing_keys,
                fingerprint={"weights": "w", "kernels": "k"},
            )
            joining.start()
            await other.worker.stopped.wait()
            await joining.close()
            assert other.worker.reason == (
                "refused: its answers would differ: another kernels (avx2 instead of k). "
                "Start it with the cluster's model and kernels"
            )
            assert joining.links[0].last_loss == other.worker.reason
            assert rig.ingress.placer.decode.worker_ids == ["decode0"]
            await other.kill()

    asyncio.run(run())


def test_without_a_worker_for_too_long_a_request_fails_with_the_reason() -> None:
    async def run() -> None:
        async with cluster("decode") as rig:
            rig.ingress.placer.timeout_s = 0.05
            await rig.node("decode0").kill()
            await asyncio.sleep(0.05)
            with pytest.raises(NoWorkerError, match="no decode worker has come back"):
                await rig.ask(PROMPT)

    asyncio.run(run())


def test_items_are_taken_only_of_the_current_attempt_and_in_order() -> None:
    delivery = Delivery(2)
    assert delivery.next_attempt() == 1 and delivery.output_token_ids() is None

    def item(attempt: int, offset: int, tokens: list[int], **more: Any) -> dict[str, Any]:
        return {"attempt": attempt, "outputs": [{"index": 0, "offset": offset, "token_ids": tokens, **more}]}

    assert delivery.take(item(1, 0, [5, 6]))
    assert not delivery.take(item(0, 2, [7]))
    with pytest.raises(OutOfStepError, match="tokens from 1 on, where 2 were delivered"):
        delivery.take(item(1, 1, [6, 7]))
    assert delivery.take(item(1, 2, [8], end=["stop", None]))
    assert delivery.next_attempt() == 2 and delivery.output_token_ids() == [[5, 6, 8], []]
    assert not delivery.take(item(1, 3, [9]))
    again = item(2, 3, [], end=["stop", None])
    assert delivery.take(again) and again["outputs"] == []  # it ended before: no second end


def test_a_worker_that_is_out_of_step_is_given_up() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", router="round_robin") as rig:
            worker = rig.node("decode0").worker
            assert worker is not None
            session = next(iter(worker.sessions))
            add = session._add

            def wrong(item: dict[str, Any]) -> None:
                for sample in item["outputs"]:
                    sample["offset"] += sample["offset"] == 6
                add(item)

            session._add = wrong  # type: ignore[method-assign]
            await rig.ask(PROMPT)
            assert rig.ingress.num_resumed == 1

    asyncio.run(run())


async def soak(num_requests: int, seed: int) -> int:
    """Random kills and restarts while 12 clients ask; returns the number of resumed requests."""
    dice = random.Random(seed)
    async with cluster("prefill", "prefill", "decode", "decode", "decode", policy="remote", step_s=0.001) as rig:
        queue = list(enumerate(prompts(num_requests, 3 * BLOCK + 4, seed)))

        async def client() -> None:
            while queue:
                i, prompt = queue.pop()
                await rig.ask(prompt, f"r{i}", n=1 + i % 7 // 6, max_tokens=10 + i % 11, seed=i)

        async def chaos() -> None:
            while queue:
                node = dice.choice(rig.nodes)
                await node.kill()
                await asyncio.sleep(dice.random() * 0.03)
                await node.start()
                await asyncio.sleep(dice.random() * 0.03)

        work: list[Coroutine[Any, Any, None]] = [client() for _ in range(12)]
        breaking = asyncio.create_task(chaos())
        await asyncio.gather(*work)
        await breaking
        await rig.all_up()
        await rig.settled()
        return rig.ingress.num_resumed


def test_under_random_kills_no_token_is_wrong_lost_or_doubled() -> None:
    assert asyncio.run(soak(150, seed=1)) > 0


@pytest.mark.slow
def test_soak() -> None:
    assert sum(asyncio.run(soak(500, seed)) for seed in range(2, 7)) > 100
