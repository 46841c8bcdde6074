"""`ServedEngine` over a cluster: the HTTP server in front is the same one as over a single engine.

The connections to the workers live in the server's own event loop and are made when its first request comes; what the
server has to know before that was asked of the workers when the backend was made.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.cluster.autoscale import Autoscaler, Limits
from paceline.cluster.choosers import make_chooser
from paceline.cluster.ingress import Ingress, IngressConfig
from paceline.cluster.joining import why_not
from paceline.cluster.page_figures import page_figures
from paceline.cluster.policy import make_policy
from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.prompt_keys import PromptKeys
from paceline.cluster.router import Router
from paceline.cluster.status import ask
from paceline.cluster.worker_spec import WorkerSpec
from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.core.step_record import Load, StepObserver
from paceline.core.tokenizer import Tokenizer
from paceline.errors import EngineDeadError, InvalidOptionError
from paceline.lab.pass_cost import PassCost

logger = logging.getLogger("paceline.cluster")
Address = tuple[str, int]
DISCOVER_EVERY_S = 1.0
SCALE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Who changes the number of workers, and within which limits."""

    scale: Callable[[str, int], None]  # (role, number of workers from now on); may block
    counts: Mapping[str, int]  # role -> workers at the start
    limits: Mapping[str, Limits]


class ClusterBackend:
    def __init__(
        self,
        addresses: Sequence[Address],
        tokenizer: Tokenizer,
        router: str = "kv_aware",
        policy: str = "cost",
        spec: WorkerSpec | None = None,  # what a worker's passes cost; None: as the first worker measured
        config: IngressConfig | None = None,
        discover: Callable[[], Sequence[Address]] | None = None,  # the workers that there are now; may block
        scaling: Scaling | None = None,
    ) -> None:
        infos = asyncio.run(_ask_all(addresses))
        info = next((one for one in infos if one["role"] != "prefill"), None)
        if info is None:
            raise InvalidOptionError("a cluster needs a decode worker: there are only prefill workers")
        for one in infos:
            if (reason := why_not(one, info["fingerprint"])) is not None:
                raise InvalidOptionError(f"worker {one['worker_id']} is refused: {reason}")
        self.max_model_len, self.vocab_size = info["max_model_len"], info["vocab_size"]
        self.max_num_seqs = sum(one["max_num_seqs"] for one in infos if one["role"] != "prefill")
        self.methods: tuple[str, ...] = tuple(info["methods"])
        self.default_sampling: Mapping[str, Any] = info["default_sampling"]
        self.cache_config: Mapping[str, str] = info["cache_config"]
        self.tokenizer = tokenizer
        self._method: str = info["method"]
        self._addresses, self._config, self._info = addresses, config, info
        self._time = PrefillTime(spec or _measured(info))
        self._router, self._policy = router, policy
        self._routers()  # an unknown name is found out now
        make_policy(policy, self._time, self._time)
        self._ingress: Ingress | None = None
        self._discover = discover
        self._scaling = scaling
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    def _routers(self) -> tuple[Router, Router]:
        size = self._info["block_size"]
        return Router(make_chooser(self._router, self._time), size), Router(
            make_chooser(self._router, self._time), size
        )

    def start(self) -> Ingress:
        """Connects to the workers, in the event loop that runs; the first request does it by itself."""
        if self._ingress is None:
            decode, prefill = self._routers()
            self._ingress = Ingress(
                self._addresses,
                decode,
                prefill,
                make_policy(self._policy, self._time, self._time),
                PromptKeys(self._info["block_size"], bytes.fromhex(self._info["digest"])),
                self.tokenizer,
                self._config,
                self._info["fingerprint"],
            )
            self._ingress.start()
            if self._discover is not None:
                self._tasks.append(asyncio.create_task(self._keep_discovering(self._ingress, self._discover)))
            if self._scaling is not None:
                self._tasks.append(asyncio.create_task(self._keep_scaling(self._ingress, self._scaling)))
        return self._ingress

    async def stop(self) -> None:
        """Ends the connections, in the event loop that they were made in."""
        for task in self._tasks:
            task.cancel()
        if self._ingress is not None:
            await self._ingress.close()
        self._ingress, self._tasks = None, []

    async def _keep_discovering(self, ingress: Ingress, discover: Callable[[], Sequence[Address]]) -> None:
        while True:
            await asyncio.sleep(DISCOVER_EVERY_S)
            try:
                ingress.use(await asyncio.to_thread(discover))
            except Exception:  # whoever is asked may be away for a while
                logger.warning("the list of workers cannot be had", exc_info=True)

    async def _keep_scaling(self, ingress: Ingress, scaling: Scaling) -> None:
        autoscaler, counts = Autoscaler(self._time.spec, scaling.limits), dict(scaling.counts)
        while True:
            await asyncio.sleep(SCALE_EVERY_S)
            for role, count in autoscaler.wanted(ingress.traffic, time.monotonic()).items():
                if count == counts[role]:
                    continue
                logger.info(
                    "%d %s workers instead of %d, for the traffic of the last minute", count, role, counts[role]
                )
                try:
                    await asyncio.to_thread(scaling.scale, role, count)
                    counts[role] = count
                except Exception:  # there may be no room for more; it is tried again
                    logger.warning("the number of %s workers cannot be changed", role, exc_info=True)

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str
    ) -> AsyncIterator[RequestOutput]:
        if self._is_closed:
            raise EngineDeadError("the cluster was shut down")
        ingress = self.start()
        await ingress.tried()
        outputs = ingress.generate(token_ids, params, request_id, cache_salt)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                yield output

    def method_of(self, params: SamplingParams) -> str:
        chosen = params.speculative or {}
        if chosen.get("off"):
            return "none"
        return str(chosen.get("method", self._method))

    def load(self) -> Load:
        figures = [link.figures for link in self._links() if link.hello.get("role") != "prefill" and link.figures]
        if not figures:
            return Load(0, 0, 0.0)
        usage = sum(one["kv_usage"] for one in figures) / len(figures)
        return Load(sum(one["num_running"] for one in figures), sum(one["num_waiting"] for one in figures), usage)

    def _links(self) -> Sequence[Any]:
        return [] if self._ingress is None else [link for link in self._ingress.links if link.is_up]

    def speculation_stats(self) -> dict[str, Any]:
        """Of the decode workers, added up."""
        total: dict[str, Any] = {}
        for link in self._links():
            if link.hello.get("role") != "prefill":
                total = _added(total, link.figures.get("speculation", {}))
        return total

    def cluster(self) -> dict[str, Any] | None:
        return None if self._ingress is None else page_figures(self._ingress)

    def watch(self, observer: StepObserver) -> None:
        """Steps happen in the workers, and are not told: the page shows no trees and no time saved."""

    def when_dead(self, callback: Callable[[Exception], None]) -> None:
        """A cluster is not dead while a worker may come back."""

    def shutdown(self) -> None:
        """The connections ended with the server's event loop."""
        self._is_closed = True

    def check_integrity(self) -> None:
        if self._ingress is not None:
            for router in self._ingress.routers:
                router.check_integrity()


def _measured(info: Mapping[str, Any]) -> WorkerSpec:
    curve = PassCost.of({int(rows): float(seconds) for rows, seconds in info["pass_cost"].items()})
    return WorkerSpec("measured", curve, max_num_seqs=info["max_num_seqs"], block_size=info["block_size"])


async def _ask_all(addresses: Sequence[Address]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(ask(host, port) for host, port in addresses)))


def _added(total: Any, more: Any) -> Any:
    """Numbers add up, dictionaries and lists entry by entry; of anything else the last one counts."""
    if isinstance(total, dict) and isinstance(more, dict):
        return {
            key: _added(total[key], more[key]) if key in total and key in more else (total | more)[key]
            for key in total | more
        }
    if isinstance(total, list) and isinstance(more, list):
        longer, shorter = (total, more) if len(total) >= len(more) else (more, total)
        return [_added(one, shorter[i]) if i < len(shorter) else one for i, one in enumerate(longer)]
    if isinstance(total, int | float) and isinstance(more, int | float) and not isinstance(more, bool):
        return total + more
    return more
