"""`WorkerEngine` over `AsyncLLM`: the one place where the cluster touches the engine's seams (`core.exchange`).

What is asked of the exchange runs in the engine's thread, between two steps, many blocks at a time. Events come from
that thread too; they are put together and handed to the worker's event loop once per batch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from paceline.cluster.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from paceline.cluster.index import routing_key
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidRequestError
from paceline.kv.exchange import KVExchange, Lease, Ticket
from paceline.kv.fingerprint import Fingerprint
from paceline.kv.hashes import BlockHash, BlockKey, block_keys, root_hash
from paceline.llm import AsyncLLM
from paceline.serve.generate.over_async_llm import OverAsyncLLM

Result = TypeVar("Result")
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
        self._block_size = int(self._served.cache_config["block_size"])

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
            "block_size": self._block_size,
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
        events = _Events(asyncio.get_running_loop(), listener)

        def begin(exchange: KVExchange) -> None:
            for key in exchange.snapshot():
                events.stored(key, exchange.block_size)
            exchange.listen(events)

        self._beginning = asyncio.ensure_future(self._exchange(begin))

    async def _exchange(
        self, work: Callable[[KVExchange], Result], when: Callable[[KVExchange], bool] | None = None
    ) -> Result:
        """In the engine's thread, between two steps; with `when`, after the step from which on that holds."""
        if when is None:
            return await self._llm.call_engine(lambda core: work(core.exchange))
        return await self._llm.call_engine(lambda core: work(core.exchange), lambda core: when(core.exchange))

    def keys(self, token_ids: Sequence[int], cache_salt: str) -> Sequence[BlockKey]:
        """As `KVExchange.usable` gives them, without a wait for the engine."""
        root = root_hash(cache_salt, self._fingerprint.digest)
        return block_keys(token_ids[:-1], self._block_size, root)

    # Blocks out

    async def pin(
        self, hashes: Sequence[BlockHash], num_read: int, computing: "asyncio.Future[None] | None" = None
    ) -> tuple[Lease, list[bytes]]:
        def work(exchange: KVExchange) -> tuple[Lease, list[bytes]]:
            lease = exchange.pin(hashes)
            return lease, [exchange.read(lease, i) for i in range(min(num_read, len(lease.hashes)))]

        if computing is None or computing.done():
            return await self._exchange(work)

        def is_stored(exchange: KVExchange) -> bool:
            return computing.done() or exchange.num_held(hashes[:1]) > 0

        def ended(computing: "asyncio.Future[None]") -> None:
            self._llm.look_again()

        computing.add_done_callback(ended)
        try:
            return await self._exchange(work, is_stored)  # before the next pass: that one may be long
        finally:
            computing.remove_done_callback(ended)

    def num_pinned(self, lease: Lease) -> int:
        return len(lease.hashes)

    async def read(self, lease: Lease, blocks: Sequence[int]) -> list[bytes] | None:
        def work(exchange: KVExchange) -> list[bytes] | None:
            if not exchange.renew(lease):
                return None
            return [exchange.read(lease, i) for i in blocks]

        try:
            return await self._exchange(work)
        except InvalidRequestError:  # the lease has ended
            return None

    async def release(self, lease: Lease) -> None:
        await self._exchange(lambda exchange: exchange.release(lease))

    # Blocks in

    async def num_here(self, keys: Sequence[BlockKey]) -> int:
        return await self._exchange(lambda exchange: exchange.num_held(key.hash for key in keys))

    async def reserve(self, keys: Sequence[BlockKey]) -> Ticket:
        return await self._exchange(lambda exchange: exchange.reserve(keys))

    def missing(self, ticket: Ticket) -> Sequence[int]:
        return ticket.missing

    async def write(self, ticket: Ticket, blocks: Sequence[tuple[int, bytes]]) -> list[bool]:
        return await self._exchange(lambda exchange: [exchange.write(ticket, i, data) for i, data in blocks])

    async def commit(
        self, ticket: Ticket, verified: Sequence[int], last: Sequence[tuple[int, bytes]]
    ) -> tuple[list[bool], int]:
        def work(exchange: KVExchange) -> tuple[list[bool], int]:
            written = [exchange.write(ticket, i, data) for i, data in last]
            good = [i for (i, _), is_good in zip(last, written, strict=True) if is_good]
            return written, exchange.commit(ticket, [*verified, *good])

        return await self._exchange(work)


class _Events:
    """The exchange's listener: in the engine's thread, and quick."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Callable[[Sequence[Event]], None]) -> None:
        self._loop, self._listener = loop, listener
        self._events: list[Event] = []
        self._known: set[BlockHash] = set()

    def stored(self, key: BlockKey, block_size: int) -> None:
        parent = routing_key(key.parent) if key.parent in self._known else None  # the root is not a block
        self._known.add(key.hash)
        self._add(BlockStored((routing_key(key.hash),), parent, key.token_ids, block_size))

    def removed(self, block_hash: BlockHash) -> None:
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
