"""Workers as replicas of Ray Serve: one Ray cluster for the whole file; skipped where Ray is not installed."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("ray.serve", reason="the extra cluster is not installed")
pytest.importorskip("paceline.kv.exchange", reason="the engine's seams are on another branch")

from paceline.cluster.app import RayCluster
from paceline.cluster.backend import ClusterBackend
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError
from paceline.llm import LLM, AsyncLLM
from paceline.spec.config.speculative_config import at_default_size
from tests.bench.toy_llm import toy_model
from tests.cluster.toy_worker import OPTIONS, slow_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


def make_engine() -> AsyncLLM:
    return AsyncLLM(slow_model(0.005), at_default_size({"method": "ngram"}), **OPTIONS)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(make_engine, ["ngram"], {"prefill": 1, "decode": 2}, cpus=0.2)
    cluster.start()
    yield cluster
    cluster.end()


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j) % 23 for j in range(40)]


def params(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=1.0, seed=i, ignore_eos=True)


def test_a_killed_replica_changes_no_answer_and_is_replaced(ray_cluster: RayCluster) -> None:
    llm = LLM(toy_model(), {"method": "none"}, **OPTIONS)
    expected = [llm.generate({"prompt_token_ids": prompt(i)}, params(i))[0].outputs[0].token_ids for i in range(8)]
    tokenizer = toy_model().tokenizer
    backend = ClusterBackend(ray_cluster.addresses(), tokenizer, policy="remote", discover=ray_cluster.addresses)

    async def ask(i: int) -> list[int]:
        tokens: list[int] = []
        async for output in backend.generate(prompt(i), params(i), f"r{i}", ""):
            for sample in output.outputs:
                tokens += sample.token_ids
        return tokens

    async def run() -> None:
        asking = asyncio.gather(*(ask(i) for i in range(8)))
        while backend.load().num_running == 0:
            await asyncio.sleep(0.02)
        ingress = backend._ingress
        assert ingress is not None
        decode = [link for link in ingress.links if link.hello["role"] == "decode"]
        victim = next(link for link in decode if link.figures.get("num_running"))
        os.kill(victim.figures["pid"], signal.SIGKILL)
        assert await asking == expected
        assert ingress.num_resumed > 0
        end_s = time.monotonic() + 100
        while sum(link.is_up for link in ingress.links) < 3 and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
        assert sum(link.is_up for link in ingress.links) == 3, "no new replica came"
        await backend.stop()

    asyncio.run(run())


def test_the_number_of_replicas_follows_and_those_that_go_are_forgotten(ray_cluster: RayCluster) -> None:
    before = len(ray_cluster.addresses())
    ray_cluster.scale("decode", 3)
    wait_for(lambda: len(ray_cluster.addresses()) == before + 1)
    ray_cluster.scale("decode", 2)
    wait_for(lambda: len(ray_cluster.addresses()) == before)


def test_an_address_without_a_ray_cluster_is_named_at_once() -> None:
    with pytest.raises(InvalidOptionError, match=r"no Ray cluster answers at '127\.0\.0\.1:1': Connection refused"):
        RayCluster(make_engine, [], {"decode": 1}, address="127.0.0.1:1").start()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)
