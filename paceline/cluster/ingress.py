"""The server's side of a cluster: each request is placed, run, and brought to its end whatever happens to workers.

    place     the decode worker that the router chooses, and by the policy a prefill worker for the prompt
    run       the worker's items are delivered in order (delivery.py)
    resume    when the worker is lost: on another one, after the tokens that were delivered

The seed of a request is drawn here, so every attempt draws the same tokens. All of it runs in one event loop.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cluster.autoscale import Traffic
from paceline.cluster.delivery import Delivery, OutOfStepError
from paceline.cluster.events import EventReader
from paceline.cluster.joining import why_not
from paceline.cluster.link import STOPPING, RefusedError, WorkerLink, WorkerLostError
from paceline.cluster.messages import decode_error, decode_output, encode_params
from paceline.cluster.open_request import OpenRequest, Recovery
from paceline.cluster.placer import Placed, Placer
from paceline.cluster.policy import Policy
from paceline.cluster.router import Reservation, Router
from paceline.core.output_merger import OutputMerger
from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.core.tokenizer import Tokenizer

logger = logging.getLogger("paceline.cluster")
NUM_RECOVERIES = 4096
PromptKeys = Callable[[Sequence[int], str], list[int]]  # (token ids, salt) -> routing keys of the full blocks


@dataclass(frozen=True, slots=True)
class IngressConfig:
    stall_timeout_s: float = 5.0  # a worker that says nothing for so long is lost
    no_worker_timeout_s: float = 60.0  # how long a request waits for a worker to come back; a new one takes about 10


class Ingress:
    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        decode_router: Router,
        prefill_router: Router,
        policy: Policy,
        prompt_keys: PromptKeys,
        tokenizer: Tokenizer | None = None,
        config: IngressConfig | None = None,
        fingerprint: Mapping[str, str] | None = None,  # that a worker must have; None: of the first that joins
    ) -> None:
        self.config = config or IngressConfig()
        self._addresses = list(addresses)
        self._running: dict[tuple[str, int], tuple[WorkerLink, asyncio.Task[None]]] = {}
        timeout_s = self.config.no_worker_timeout_s
        self.placer = Placer(decode_router, prefill_router, policy, timeout_s)
        self.traffic = Traffic()
        self.num_resumed = 0
        self.recoveries: deque[Recovery] = deque(maxlen=NUM_RECOVERIES)  # newest last
        self._prompt_keys, self._tokenizer = prompt_keys, tokenizer
        self._fingerprint = fingerprint
        self._by_id: dict[str, WorkerLink] = {}
        self._open: dict[str, OpenRequest] = {}

    @property
    def routers(self) -> tuple[Router, Router]:
        return self.placer.decode, self.placer.prefill

    @property
    def links(self) -> list[WorkerLink]:
        return [link for link, _ in self._running.values()]

    def start(self) -> None:
        self.use(self._addresses)

    def use(self, addresses: Sequence[tuple[str, int]]) -> None:
        """The workers that there are now: new ones are connected to; those that are gone are not tried any more."""
        for address in addresses:
            if address not in self._running:
                link = WorkerLink(self, *address, self.config.stall_timeout_s)
                self._running[address] = link, asyncio.create_task(link.run())
        for address in set(self._running) - set(addresses):
            link, task = self._running[address]
            if not link.is_up:
                task.cancel()
                del self._running[address]

    async def tried(self) -> None:
        """All workers have joined, or could not: before that the first request would not find the best place."""
        for link in self.links:
            await link.tried.wait()

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What links tell (LinkOwner)

    def check(self, hello: Mapping[str, Any]) -> None:
        if hello["worker_id"] in self._by_id:
            raise RefusedError(f"a worker with the name {hello['worker_id']!r} is there already")
        if self._fingerprint is None:
            self._fingerprint = hello["fingerprint"]
        reason = why_not(hello, self._fingerprint)
        if reason is not None:
            raise RefusedError(reason)

    def joined(self, link: WorkerLink) -> EventReader:
        router = self.placer.router_of(link)
        router.add(link.worker_id)
        self._by_id[link.worker_id] = link
        self.placer.note_joined()
        logger.info("worker %s joined (%s)", link.worker_id, link.hello["role"])
        return EventReader(link.worker_id, router, link.ask_replay)

    def leaving(self, link: WorkerLink) -> None:
        """It gets nothing new; what it has, it finishes."""
        logger.info("worker %s leaves", link.worker_id)
        self.placer.router_of(link).remove(link.worker_id)

    def lost(self, link: WorkerLink, reason: str) -> None:
        logger.log(
            logging.INFO if reason == STOPPING else logging.WARNING, "worker %s is lost: %s", link.worker_id, reason
        )
        self.placer.router_of(link).remove(link.worker_id)
        del self._by_id[link.worker_id]
        for request in self._open.values():
            if request.link is link:
                request.lost = reason
                request.changed.set()

    def items(self, link: WorkerLink, items: list[dict[str, Any]]) -> None:
        for item in items:
            request = self._open.get(item["id"])
            if request is None or request.link is not link:
                continue  # it ended, or runs elsewhere by now
            if "outputs" in item:
                try:
                    if not request.delivery.take(item):
                        continue
                except OutOfStepError as error:
                    raise WorkerLostError(f"out of step in request {item['id']}: {error}") from error
            elif item["attempt"] != request.delivery.attempt:
                continue
            if "outputs" in item and (recovery := request.heard()) is not None:
                self.recoveries.append(recovery)
            if "fetched" in item and request.placed is not None:
                request.placed.num_fetched_blocks = item["fetched"]
                request.placed.reason += f"; transfer {item['why']}"
                request.leave_prefill()
            request.items.append(item)
            request.changed.set()

    # Requests

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]:
        """Deltas; closing the iterator aborts the request."""
        if params.seed is None:
            params = params.clone()
            params.seed = secrets.randbits(63)
        tokens = list(token_ids)
        base = {"id": request_id, "token_ids": tokens, "params": encode_params(params), "salt": cache_salt}
        request = self._open[request_id] = OpenRequest(Delivery(params.n), self.traffic.note(len(tokens)))
        keys, avoid = self._prompt_keys(tokens, cache_salt), list[str]()
        try:
            while True:
                request.waited |= request.resumes_after is not None and not self.placer.decode.worker_ids
                place = await self.placer.route(keys, len(tokens), avoid)
                try:
                    self._begin(request, place, base, keys, params)
                    async for output in self._read(request, request_id, tokens, place):
                        yield output
                        if output.finished:
                            return
                except WorkerLostError as error:
                    self.num_resumed += 1
                    request.resumes_after = str(error)
                    avoid = [place.worker_id]
                    logger.info("request %s goes on elsewhere after %s: %s", request_id, place.worker_id, error)
                finally:
                    request.leave_prefill()
                    place.close()
        finally:
            del self._open[request_id]
            request.seen.num_output_tokens = sum(map(len, request.delivery.tokens))
            if request.link is not None:
                request.link.abort(request_id, request.delivery.attempt)  # without effect where it has ended

    def _begin(
        self,
        request: OpenRequest,
        place: Reservation,
        base: dict[str, Any],
        keys: Sequence[int],
        params: SamplingParams,
    ) -> None:
        link = self._by_id[place.worker_id]
        request.link, request.lost, request.items = link, None, []
        meta = base | {"attempt": request.delivery.next_attempt()}
        if (delivered := request.delivery.output_token_ids()) is not None:
            meta["output_token_ids"] = delivered
        reason = "no prefill worker"
        placed = Placed(base["id"], place.worker_id, meta["attempt"], place.num_cached_blocks, None, reason, keys)
        request.placed = placed
        self.placer.placed.append(placed)
        if params.prompt_logprobs is None:
            request.there = self.placer.prefill_elsewhere(placed, place, len(base["token_ids"]), keys)
            if request.there is not None:
                holder = self._by_id[request.there.worker_id]
                # One token more than its blocks: a drafter's row is made with the token that comes next, so that
                # without it the last row would be another one than here, and other drafts would be accepted.
                num_tokens = len(keys) * self.placer.prefill.block_size + 1
                meta["fetch"] = {"host": holder.host, "port": holder.port, "num_tokens": num_tokens}
        request.seen.num_new_tokens = place.num_uncached_tokens
        request.seen.is_remote = placed.prefill_worker_id is not None
        link.submit(meta)

    async def _read(
        self, request: OpenRequest, request_id: str, token_ids: list[int], place: Reservation
    ) -> AsyncIterator[RequestOutput]:
        """What came since it was last asked, as one delta; raises WorkerLostError once all that came is read."""
        while True:
            items, request.items = request.items, []
            if not items:
                if request.lost is not None:
                    raise WorkerLostError(request.lost)
                request.changed.clear()
                await request.changed.wait()
                continue
            merger, is_empty = OutputMerger(), True
            for item in items:
                if "raised" in item:
                    raise decode_error(item["raised"])
                if "outputs" in item:
                    merger.add(decode_output(item, request_id, token_ids, self._tokenizer))
                    is_empty = False
            if not is_empty:
                place.first_token()
                yield merger.output()
