"""`WorkerEngine` over `AsyncLLM`: the one place where the cluster touches the engine's seams (`core.exchange`).

What is asked of the exchange runs in the engine's thread, between two steps, many blocks at a time. Events come from
that thread too; they are put together and handed to the worker's event loop once per batch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from paceline.cluster.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from paceline.cluster.index import routing_key
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidRequestError
from paceline.kv.fingerprint import Fingerprint
from paceline.llm import AsyncLLM
from paceline.serve.generate.over_async_llm import OverAsyncLLM

MEASURED_ROWS = (1, 16, 64, 256)
ROUNDS = 3


class EngineSeam:
    def __init__(
        self, llm: AsyncLLM, methods: Sequence[str], fingerprint: Fingerprint, pass_cost: Mapping[int, float]
    ) -> None:
        self._llm = llm
        self._served = OverAsyncLLM(llm, methods)
        self._served.watch(lambda step: None)  # it keeps the counts of drafts up to date
        self._fingerprint, self._pass_cost = fingerprint, pass_cost
        self._events: _Events | None = None

    @staticmethod
    async def make(
        llm: AsyncLLM,
        methods: Sequence[str],
        pass_cost: Mapping[int, float] | None = None,  # seconds by rows; None: measured
    ) -> "EngineSeam":
        pass_cost = pass_cost or await _measure(llm)
        fingerprint = await llm.call_engine(lambda core: core.exchange.fingerprint)
        return EngineSeam(llm, methods, fingerprint, pass_cost)

    def info(self) -> dict[str, Any]:
        served = self._served
        return {
            "max_model_len": served.max_model_len,
            "vocab_size": served.vocab_size,
            "max_num_seqs": served.max_num_seqs,
            "methods": list(served.methods),
            "method": served.method_of(SamplingParams()),
            "default_sampling": dict(served.default_sampling),
            "cache_config": dict(served.cache_config),
            "block_size": int(served.cache_config["block_size"]),
            "fingerprint": self._fingerprint.to_dict(),
            "digest": self._fingerprint.digest.hex(),
            "pass_cost": {str(rows): seconds for rows, seconds in self._pass_cost.items()},
        }

    def figures(self) -> dict[str, Any]:
        load = self._served.load()
        return {
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "kv_usage": load.kv_usage,
            "speculation": self._served.speculation_stats(),
        }

    def generate(
        self, prompt: Mapping[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        outputs: AsyncIterator[RequestOutput] = self._llm.generate(
            prompt, params, request_id, output_kind=RequestOutputKind.DELTA
        )
        return outputs

    def shutdown(self) -> None:
        self._llm.shutdown()

    def check_integrity(self) -> None:
        self._llm.check_integrity()

    def listen(self, listener: Callable[[Sequence[Event]], None]) -> None:
        events = self._events = _Events(asyncio.get_running_loop(), listener)

        def begin(core: Any) -> None:
            for key in core.exchange.snapshot():
                events.stored(key, core.exchange.block_size)
            core.exchange.listen(events)

        self._beginning = asyncio.ensure_future(self._call(begin))

    async def _call(self, work: Callable[[Any], Any]) -> Any:
        return await self._llm.call_engine(work)

    async def keys(self, token_ids: Sequence[int], cache_salt: str) -> Sequence[Any]:
        found: Sequence[Any] = await self._call(lambda core: core.exchange.usable(token_ids, cache_salt))
        return found

    # Blocks out

    async def pin(self, hashes: Sequence[bytes]) -> Any:
        return await self._call(lambda core: core.exchange.pin(hashes))

    def num_pinned(self, lease: Any) -> int:
        return len(lease.hashes)

    async def read(self, lease: Any, blocks: Sequence[int]) -> list[bytes] | None:
        def work(core: Any) -> list[bytes] | None:
            if not core.exchange.renew(lease):
                return None
            return [core.exchange.read(lease, i) for i in blocks]

        try:
            found: list[bytes] | None = await self._call(work)
        except InvalidRequestError:  # the lease has ended
            return None
        return found

    async def release(self, lease: Any) -> None:
        await self._call(lambda core: core.exchange.release(lease))

    # Blocks in

    async def reserve(self, keys: Sequence[Any]) -> Any:
        return await self._call(lambda core: core.exchange.reserve(keys))

    def missing(self, ticket: Any) -> Sequence[int]:
        found: Sequence[int] = ticket.missing
        return found

    async def write(self, ticket: Any, blocks: Sequence[tuple[int, bytes]]) -> list[bool]:
        found: list[bool] = await self._call(lambda core: [core.exchange.write(ticket, i, data) for i, data in blocks])
        return found

    async def commit(self, ticket: Any, verified: Sequence[int]) -> int:
        found: int = await self._call(lambda core: core.exchange.commit(ticket, verified))
        return found


class _Events:
    """The exchange's listener: in the engine's thread, and quick."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Callable[[Sequence[Event]], None]) -> None:
        self._loop, self._listener = loop, listener
        self._events: list[Event] = []
        self._known: set[bytes] = set()

    def stored(self, key: Any, block_size: int) -> None:
        parent = routing_key(key.parent) if key.parent in self._known else None  # the root is not a block
        self._known.add(key.hash)
        self._add(BlockStored((routing_key(key.hash),), parent, key.token_ids, block_size))

    def removed(self, block_hash: bytes) -> None:
        self._known.discard(block_hash)
        self._add(BlockRemoved((routing_key(block_hash),)))

    def cleared(self) -> None:
        self._known.clear()
        self._add(AllBlocksCleared())

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        events, self._events = self._events, []
        self._listener(events)


async def _measure(llm: AsyncLLM) -> dict[int, float]:
    """Seconds of prompts of some lengths, one at a time: what the router and the `cost` policy begin with."""
    found: dict[int, float] = {}
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, speculative={"off": True})
    longest = llm.max_model_len - 2
    for turn in range(ROUNDS):
        for rows in sorted({min(rows, longest) for rows in MEASURED_ROWS}):
            tokens = [(7 * turn + 13 * i + rows) % llm.vocab_size for i in range(rows)]
            begin_s = time.perf_counter()
            async for _ in llm.generate({"prompt_token_ids": tokens}, params, f"measure-{turn}-{rows}"):
                pass
            found[rows] = min(found.get(rows, 1e9), time.perf_counter() - begin_s)
    await llm.reset_prefix_cache()
    return found
