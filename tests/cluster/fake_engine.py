"""An engine that costs nothing: the token at a position is a function of (prompt, seed, sample, position).

So the right answer of every request is known, however it was cut into steps, moved or resumed. It has a prefix cache
with the exchange of blocks that a worker needs, checks what it is given, and counts what is held.
"""

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.events import BlockStored, Event
from paceline.cluster.index import routing_key
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.errors import EngineDeadError, InvalidRequestError

BLOCK = 16
BLOCK_BYTES = 3000


@dataclass(frozen=True)
class Key:
    hash: bytes


def prompt_keys(token_ids: Sequence[int], salt: str) -> list[Key]:
    keys, parent = [], salt.encode()
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        parent = hashlib.blake2b(parent + repr(token_ids[start : start + BLOCK]).encode(), digest_size=16).digest()
        keys.append(Key(parent))
    return keys


def routing_keys(token_ids: Sequence[int], salt: str) -> list[int]:
    return [routing_key(key.hash) for key in prompt_keys(token_ids[:-1], salt)]


def token(prompt: Sequence[int], seed: int, sample: int, position: int) -> int:
    return zlib.crc32(repr((list(prompt), seed, sample, position)).encode()) % 1000


def answer(prompt: Sequence[int], params: SamplingParams, sample: int = 0) -> list[int]:
    assert params.seed is not None and params.max_tokens is not None
    return [token(prompt, params.seed, sample, i) for i in range(params.max_tokens)]


def content(block_hash: bytes) -> bytes:
    return (block_hash * (BLOCK_BYTES // 16 + 1))[:BLOCK_BYTES]


@dataclass
class FakeEngine:
    tokens_per_step: int = 2
    step_s: float = 0.0
    chunk_blocks: int = 1000  # of a prompt that are computed in one step
    fingerprint: Mapping[str, str] = field(default_factory=lambda: {"weights": "w", "kernels": "k"})
    blocks: set[bytes] = field(default_factory=set)
    on_step: Callable[[str, int], None] | None = None  # (request id, tokens so far), before the step's tokens
    on_chunk: Callable[[str, int], None] | None = None  # (request id, blocks of its prompt so far), before the next
    num_computed_tokens: int = 0  # of prompts
    num_held: int = 0  # leases and tickets
    running: set[str] = field(default_factory=set)
    is_dead: bool = False

    def info(self) -> dict[str, Any]:
        return {"max_model_len": 4096, "vocab_size": 1000, "block_size": BLOCK, "fingerprint": dict(self.fingerprint)}

    def figures(self) -> dict[str, Any]:
        return {"num_running": len(self.running), "num_waiting": 0, "kv_usage": 0.0, "speculation": {}}

    def listen(self, listener: Callable[[Sequence[Event]], None]) -> None:
        self._listener = listener

    def shutdown(self) -> None:
        self.is_dead = True

    def keys(self, token_ids: Sequence[int], cache_salt: str) -> Sequence[Key]:
        return prompt_keys(token_ids[:-1], cache_salt)

    async def generate(
        self, prompt: Mapping[str, Any], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        tokens, salt = prompt["prompt_token_ids"], prompt.get("cache_salt") or ""
        if tokens[0] == 999:
            raise InvalidRequestError("this prompt is refused")
        assert request_id not in self.running, "a request id is used twice"
        assert params.seed is not None or params.max_tokens == 1, "the ingress draws the seed"
        given = prompt.get("output_token_ids") or [[] for _ in range(params.n)]
        told = [list(one) for one in ([given] if params.n == 1 and given and isinstance(given[0], int) else given)]
        self.running.add(request_id)
        try:
            cached = await self._compute(tokens, salt, request_id)
            async for output in self._steps(tokens, params, request_id, told):
                output.num_cached_tokens = cached
                yield output
        finally:
            self.running.discard(request_id)

    async def _compute(self, tokens: list[int], salt: str, request_id: str) -> int:
        keys = prompt_keys(tokens, salt)
        usable = keys[: (len(tokens) - 1) // BLOCK]
        num_cached = next((i for i, key in enumerate(usable) if key.hash not in self.blocks), len(usable)) * BLOCK
        self.num_computed_tokens += len(tokens) - num_cached
        for begin in range(0, len(keys), self.chunk_blocks):
            if begin:
                await asyncio.sleep(self.step_s)
                if self.on_chunk is not None:
                    self.on_chunk(request_id, begin)
                if self.is_dead:
                    raise EngineDeadError("dead")
            self._store([key.hash for key in keys[begin : begin + self.chunk_blocks]])
        return num_cached

    def _store(self, hashes: Sequence[bytes]) -> None:
        new = [one for one in hashes if one not in self.blocks]
        self.blocks.update(new)
        if new:
            self._listener([BlockStored(tuple(map(routing_key, new)))])

    async def _steps(
        self, tokens: list[int], params: SamplingParams, request_id: str, told: list[list[int]]
    ) -> AsyncIterator[RequestOutput]:
        seed, most = params.seed or 0, params.max_tokens or 16
        for sample, delivered in enumerate(told):
            right = [token(tokens, seed, sample, i) for i in range(len(delivered))]
            assert delivered == right, "resumed after tokens that are not the right ones"
        counts = [len(delivered) for delivered in told]
        ended = [False] * params.n
        while not all(ended):
            await asyncio.sleep(self.step_s)
            if self.on_step is not None:
                self.on_step(request_id, min(counts))
            if self.is_dead:
                raise EngineDeadError("dead")
            outputs = []
            for sample in range(params.n):
                if ended[sample]:
                    continue
                new = list(range(counts[sample], min(counts[sample] + self.tokens_per_step, most)))
                counts[sample] += len(new)
                ended[sample] = counts[sample] >= most
                outputs.append(self._output(tokens, seed, sample, new, params, ended[sample]))
            yield RequestOutput(request_id, None, tokens, outputs, finished=all(ended))

    def _output(
        self, tokens: list[int], seed: int, sample: int, new: list[int], params: SamplingParams, is_end: bool
    ) -> CompletionOutput:
        ids = [token(tokens, seed, sample, i) for i in new]
        output = CompletionOutput(sample, "".join(f" {one}" for one in ids), ids, "length" if is_end else None)
        output.token_sources = ["target"] * len(ids)
        if params.logprobs is not None:
            output.token_logprobs = [TokenLogprobs(one, -one / 7, 1, {one: -one / 7}) for one in ids]
            output.cumulative_logprob = 0.0
        return output

    # blocks out

    async def pin(
        self, hashes: Sequence[bytes], num_read: int, computing: "asyncio.Future[None] | None" = None
    ) -> tuple[list[bytes], list[bytes]]:
        self.num_held += 1
        while computing is not None and not computing.done() and hashes[0] not in self.blocks:
            await asyncio.sleep(0.001)
        count = next((i for i, one in enumerate(hashes) if one not in self.blocks), len(hashes))
        return list(hashes[:count]), [content(one) for one in hashes[: min(count, num_read)]]

    def num_pinned(self, lease: list[bytes]) -> int:
        return len(lease)

    async def read(self, lease: list[bytes], blocks: Sequence[int]) -> list[bytes] | None:
        await asyncio.sleep(0)
        return [content(lease[i]) for i in blocks]

    async def release(self, lease: list[bytes]) -> None:
        self.num_held -= 1

    # blocks in

    async def num_here(self, keys: Sequence[Key]) -> int:
        return next((i for i, key in enumerate(keys) if key.hash not in self.blocks), len(keys))

    async def reserve(self, keys: Sequence[Key]) -> dict[str, Any]:
        self.num_held += 1
        return {"keys": list(keys), "written": {}}

    def missing(self, ticket: dict[str, Any]) -> Sequence[int]:
        return [i for i, key in enumerate(ticket["keys"]) if key.hash not in self.blocks]

    async def write(self, ticket: dict[str, Any], blocks: Sequence[tuple[int, bytes]]) -> list[bool]:
        await asyncio.sleep(0)
        for i, data in blocks:
            assert data == content(ticket["keys"][i].hash), "a damaged block reached the engine"
            ticket["written"][i] = data
        return [True] * len(blocks)

    async def commit(
        self, ticket: dict[str, Any], verified: Sequence[int], last: Sequence[tuple[int, bytes]]
    ) -> tuple[list[bool], int]:
        good = await self.write(ticket, last)
        self.num_held -= 1
        stored = [*verified, *(i for i, _ in last)]
        assert set(stored) <= set(ticket["written"])
        self._store([ticket["keys"][i].hash for i in stored])
        keys = ticket["keys"]
        return good, next((i for i, key in enumerate(keys) if key.hash not in self.blocks), len(keys))
