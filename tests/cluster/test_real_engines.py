"""Workers with real engines in one process: disaggregated and resumed answers are a single engine's, bit for bit.

A toy model for all but the drafter with rows of its own, and the real one where a test is slow anyway. The model is
loaded once and shared; every worker has an engine, a KV cache and a thread of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.cluster.choosers import make_chooser
from paceline.cluster.engine_seam import EngineSeam
from paceline.cluster.ingress import Ingress
from paceline.cluster.link import WorkerLostError
from paceline.cluster.policy import make_policy
from paceline.cluster.prompt_keys import PromptKeys
from paceline.cluster.router import Router
from paceline.cluster.worker import Worker
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.llm import AsyncLLM
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import at_default_size
from tests.bench.toy_llm import toy_model
from tests.cluster.specs import time

pytest.importorskip("paceline.kv.exchange", reason="the engine's seams are on another branch")

BLOCK = 4
TEXT = "A list of things that one may find in a kitchen: a pan, a pot, a knife, a spoon, a fork, a bowl, a cup. "
OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 200, "block_size": BLOCK, "max_token_delay_s": 0.02}
TOY = toy_model()
TOY_PROMPT = [(7 * i + i * i // 5) % 23 for i in range(30)]


@dataclass
class RealNode:
    worker: Worker
    llm: AsyncLLM


class RealCluster:
    def __init__(self, nodes: Sequence[RealNode], ingress: Ingress) -> None:
        self.nodes, self.ingress = nodes, ingress

    async def ask(self, prompt: list[int], params: SamplingParams, request_id: str) -> "Answer":
        return await read(self.ingress.generate(prompt, params, request_id, ""))


@dataclass
class Answer:
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str | None
    num_cached: int | None
    mean_length: float | None


async def read(outputs: AsyncIterator[RequestOutput]) -> Answer:
    answer = Answer([], "", [], None, None, None)
    async for output in outputs:
        assert output.error is None
        answer.num_cached = output.num_cached_tokens if answer.num_cached is None else answer.num_cached
        for sample in output.outputs:
            answer.token_ids += sample.token_ids
            answer.text += sample.text
            answer.logprobs += [one.logprob for one in sample.token_logprobs or []]
            answer.finish_reason = sample.finish_reason
        if output.metrics is not None:
            answer.mean_length = output.metrics.mean_acceptance_length
    return answer


@asynccontextmanager
async def real_cluster(model: LoadedModel, method: str, *roles: str) -> AsyncIterator[RealCluster]:
    nodes = []
    for i, role in enumerate(roles):
        llm = AsyncLLM(model, at_default_size({"method": method}), **OPTIONS)
        worker = Worker(await EngineSeam.make(llm, ["ngram"], {1: 0.01}), role, f"{role}{i}")
        await worker.start("127.0.0.1", 0)
        nodes.append(RealNode(worker, llm))
    info = nodes[0].worker.hello()
    ingress = Ingress(
        [("127.0.0.1", node.worker.port) for node in nodes],
        Router(make_chooser("round_robin"), BLOCK),
        Router(make_chooser("round_robin"), BLOCK),
        make_policy("remote", time(), time()),
        PromptKeys(BLOCK, bytes.fromhex(info["digest"])),
        model.tokenizer,
    )
    ingress.start()
    try:
        while not all(link.is_up for link in ingress.links):
            await asyncio.sleep(0.01)
        yield RealCluster(nodes, ingress)
    finally:
        await ingress.close()
        for node in nodes:
            await node.worker.close()
            node.llm.check_integrity()


async def alone(model: LoadedModel, method: str, prompt: list[int], params: SamplingParams) -> Answer:
    llm = AsyncLLM(model, at_default_size({"method": method}), **OPTIONS)
    try:
        given = {"prompt_token_ids": prompt}
        return await read(llm.generate(given, params, "alone", output_kind=RequestOutputKind.DELTA))
    finally:
        llm.shutdown()


CASES: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 20, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.9, "seed": 11, "max_tokens": 20, "logprobs": 2, "repetition_penalty": 1.1, "ignore_eos": True},
]


async def check_disaggregated(model: LoadedModel, method: str, prompt: list[int]) -> None:
    async with real_cluster(model, method, "prefill", "decode") as cluster:
        for i, case in enumerate(CASES):
            params, asked = SamplingParams(**case), [i + 1, *prompt]
            expected = await alone(model, method, asked, params)
            found = await cluster.ask(asked, params, f"r{i}")
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.logprobs == expected.logprobs
            assert found.finish_reason == expected.finish_reason
            assert found.mean_length == expected.mean_length, "the drafter lost its state on the way"
            assert found.num_cached == len(prompt) // BLOCK * BLOCK
        assert cluster.nodes[1].worker.num_fetched_blocks == 2 * (len(prompt) // BLOCK)


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_disaggregated_answers_are_the_local_ones(method: str) -> None:
    asyncio.run(check_disaggregated(TOY, method, TOY_PROMPT))


@pytest.mark.slow
def test_a_drafters_rows_come_with_the_blocks(smollm2_float32: LoadedModel) -> None:
    prompt = smollm2_float32.tokenizer.encode(TEXT * 4 + "Another list:")
    asyncio.run(check_disaggregated(smollm2_float32, "eagle3", prompt))


@pytest.mark.slow
def test_rows_of_a_drafter_that_come_with_blocks_are_those_that_one_engine_makes(smollm2_float32: LoadedModel) -> None:
    """Also the last one of the last block, which is made with the token after it."""
    prompt = smollm2_float32.tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    async def run() -> None:
        llm = AsyncLLM(smollm2_float32, at_default_size({"method": "eagle3"}), **OPTIONS)
        one = await EngineSeam.make(llm, [], {1: 0.01})
        await read(one.generate({"prompt_token_ids": prompt}, params, "alone"))
        expected = await blocks_of(one, prompt)
        llm.shutdown()
        async with real_cluster(smollm2_float32, "eagle3", "prefill", "decode") as cluster:
            await cluster.ask(prompt, params, "r")
            for node in cluster.nodes:
                assert await blocks_of(node.worker.engine, prompt) == expected

    asyncio.run(run())


async def blocks_of(engine: Any, prompt: list[int]) -> list[bytes]:
    hashes = [key.hash for key in engine.keys(prompt, "")]
    lease, data = await engine.pin(hashes, len(hashes))
    await engine.release(lease)
    assert len(data) == len(hashes)
    return list(data)


@pytest.mark.parametrize("case", CASES, ids=["greedy", "seeded"])
@pytest.mark.parametrize("after", [1, 5, 12])
def test_a_request_resumed_elsewhere_goes_on_as_it_would_have(case: dict[str, Any], after: int) -> None:
    async def run() -> None:
        params = SamplingParams(**case)
        expected = await alone(TOY, "none", TOY_PROMPT, params)
        async with real_cluster(TOY, "none", "decode", "decode") as cluster:
            take, seen = cluster.ingress.items, [0]

            def items(link: Any, found: list[dict[str, Any]]) -> None:
                before = seen[0]
                seen[0] += sum(len(one["token_ids"]) for item in found for one in item["outputs"])
                if before < after <= seen[0]:  # the connection ends in mid-stream, as if its process had been killed
                    raise WorkerLostError("killed by the test")
                take(link, found)

            cluster.ingress.items = items  # type: ignore[method-assign]
            found = await cluster.ask(TOY_PROMPT, params, "r")
            assert cluster.ingress.num_resumed == 1
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.logprobs == expected.logprobs and found.finish_reason == expected.finish_reason

    asyncio.run(run())


def test_events_of_a_real_engine_lead_the_router() -> None:
    async def run() -> None:
        async with real_cluster(TOY, "none", "decode") as cluster:
            await cluster.ask(TOY_PROMPT, SamplingParams(max_tokens=2, temperature=0), "r")
            keys = PromptKeys(BLOCK, bytes.fromhex(cluster.nodes[0].worker.hello()["digest"]))(TOY_PROMPT, "")
            router = cluster.ingress.placer.decode
            while router.num_held("decode0") < len(keys):
                await asyncio.sleep(0.01)
            place = router.route(keys, len(TOY_PROMPT))
            assert place.num_cached_blocks == len(keys) == (len(TOY_PROMPT) - 1) // BLOCK
            place.close()

    asyncio.run(run())
