"""A small cluster in one event loop: fake engines behind real workers and real sockets, and ways to hurt them."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from paceline.cluster.choosers import make_chooser
from paceline.cluster.ingress import Ingress, IngressConfig
from paceline.cluster.policy import make_policy
from paceline.cluster.router import Router
from paceline.cluster.transport import Listener
from paceline.cluster.worker import Worker
from paceline.core.sampling_params import SamplingParams
from tests.cluster.fake_engine import BLOCK, FakeEngine, answer, routing_keys
from tests.cluster.specs import time


class Node:
    """A worker that can be killed, frozen and started again at the same port."""

    def __init__(self, engine: FakeEngine, role: str, name: str) -> None:
        self.engine, self.role, self.name = engine, role, name
        self.port = 0
        self.worker: Worker | None = None
        self.frozen = False

    async def start(self) -> None:
        self.engine.is_dead = False
        self.worker = Worker(self.engine, self.role, self.name)
        await self.worker.start("127.0.0.1", self.port)
        self.port = self.worker.port

    async def kill(self) -> None:
        """As kill -9 looks from outside: all its connections end, and what it held in memory is gone."""
        worker, self.worker = self.worker, None
        if worker is not None:
            listener: Listener = worker._listener
            await listener.close()
            self.engine.blocks.clear()

    def kill_soon(self) -> None:
        self._killing = asyncio.ensure_future(self.kill())


class Rig:
    def __init__(self, ingress: Ingress, nodes: Sequence[Node]) -> None:
        self.ingress, self.nodes = ingress, nodes

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    async def ask(self, prompt: list[int], request_id: str = "r", **options: Any) -> dict[str, Any]:
        """Runs a request and checks its answer; returns what is worth looking at."""
        options.setdefault("seed", 7)
        params = SamplingParams(**{"max_tokens": 20, **options})
        got: list[list[int]] = [[] for _ in range(params.n)]
        texts = [""] * params.n
        ends: list[str | None] = [None] * params.n
        cumulative: list[float | None] = [None] * params.n
        cached = None
        async with aclosing(self.ingress.generate(prompt, params, request_id, "")) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                assert output.error is None
                cached = output.num_cached_tokens if cached is None else cached
                for sample in output.outputs:
                    got[sample.index] += sample.token_ids
                    texts[sample.index] += sample.text
                    assert ends[sample.index] is None, "something after the end"
                    ends[sample.index] = sample.finish_reason
                    cumulative[sample.index] = sample.cumulative_logprob
        for sample in range(params.n):
            right = answer(prompt, params, sample)
            assert got[sample] == right, f"{request_id}: {got[sample]} is not {right}"
            assert texts[sample] == "".join(f" {one}" for one in right)
            assert ends[sample] == "length"
        return {"cached": cached, "cumulative": cumulative}

    async def all_up(self) -> None:
        for _ in range(500):
            if all(link.is_up for link in self.ingress.links):
                return
            await asyncio.sleep(0.01)
        raise AssertionError([link.last_loss for link in self.ingress.links])

    async def settled(self) -> None:
        """Nothing runs and nothing is held any more."""
        for _ in range(500):
            if not any(node.engine.running or node.engine.num_held for node in self.nodes):
                break
            await asyncio.sleep(0.01)
        assert not any(node.engine.running or node.engine.num_held for node in self.nodes)
        for router in self.ingress.routers:
            router.check_integrity()
            for worker_id in router.worker_ids:
                load = router.load(worker_id)
                assert load.num_queued == load.queued_tokens == load.num_running == 0


@asynccontextmanager
async def cluster(
    *roles: str, router: str = "kv_aware", policy: str = "remote", stall_timeout_s: float = 5.0, **engine: Any
) -> AsyncIterator[Rig]:
    nodes = [Node(FakeEngine(**engine), role, f"{role}{i}") for i, role in enumerate(roles)]
    for node in nodes:
        await node.start()
    routers = [Router(make_chooser(router, time()), BLOCK, seed=0) for _ in range(2)]
    ingress = Ingress(
        [("127.0.0.1", node.port) for node in nodes],
        *routers,
        make_policy(policy, time(), time()),
        routing_keys,
        config=IngressConfig(stall_timeout_s, no_worker_timeout_s=5.0),
    )
    ingress.start()
    rig = Rig(ingress, nodes)
    try:
        await rig.all_up()
        yield rig
    finally:
        await ingress.close()
        for node in nodes:
            await node.kill()


def prompts(count: int, length: int = 100, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(900) for _ in range(length)] for _ in range(count)]
