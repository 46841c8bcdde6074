"""The same workers as replicas of Ray Serve: on one machine, or wherever a Ray cluster has room (extra `cluster`).

Ray places replicas, starts them again and scales them. Tokens do not go through it: every replica opens the port of a
worker (worker.py) and tells a small actor where, again and again; the server connects to those that were heard of
lately. So one frame per engine step carries the tokens of all its requests, as between local processes.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.cluster.block_transport import make_transport
from paceline.cluster.engine_seam import EngineSeam
from paceline.cluster.event_loop import run
from paceline.cluster.local import WorkerStartError
from paceline.cluster.worker import Worker
from paceline.errors import InvalidOptionError, MissingExtraError
from paceline.llm import AsyncLLM

logger = logging.getLogger("paceline.cluster")
NAMESPACE = "paceline"
REGISTRY = "paceline-workers"
TELL_EVERY_S = 1.0
FORGET_AFTER_S = 6.0  # of silence: a replica that was killed is unreachable long before
START_TIMEOUT_S = 300.0
REACH_TIMEOUT_S = 5.0


def _ray() -> Any:
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise MissingExtraError("a cluster on Ray", "ray[serve]", "cluster") from error
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes. `auto` and `local` are names and not places."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise InvalidOptionError(f"no Ray cluster answers at {address!r}: {error.strerror or error}") from error


class Registry:
    """The actor that knows where the workers are."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], float] = {}

    def tell(self, host: str, port: int) -> None:
        self._seen[host, port] = time.monotonic()

    def addresses(self) -> list[tuple[str, int]]:
        now = time.monotonic()
        self._seen = {address: seen for address, seen in self._seen.items() if now - seen < FORGET_AFTER_S}
        return sorted(self._seen)


class WorkerReplica:
    """What Ray Serve runs: one worker, in a thread and an event loop of its own."""

    def __init__(self, role: str, make_engine: Callable[[], AsyncLLM], methods: Sequence[str], transport: str) -> None:
        ray = _ray()
        self._role, self._make_engine, self._methods, self._transport = role, make_engine, methods, transport
        self._host: str = ray.util.get_node_ip_address()
        self._name = f"{role}-{ray.get_runtime_context().get_actor_id()[:8]}"
        self._registry = ray.get_actor(REGISTRY, namespace=NAMESPACE)
        self._worker: Worker | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-worker", daemon=True)
        self._thread.start()
        self._ready.wait(START_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            run(self._serve())
        except BaseException as error:
            self._failure = error
            logger.exception("the worker %s ended", self._name)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        llm = self._make_engine()
        seam = await EngineSeam.make(llm, self._methods)
        worker = self._worker = Worker(seam, self._role, self._name, make_transport(self._transport))
        loop = asyncio.get_running_loop()

        def on_death(error: Exception) -> None:
            loop.call_soon_threadsafe(worker.stop, f"the engine died: {error}")

        llm.on_death = on_death
        await worker.start(self._host, 0)
        self._ready.set()
        while not worker.stopped.is_set():
            self._registry.tell.remote(self._host, worker.port)
            try:
                async with asyncio.timeout(TELL_EVERY_S):
                    await worker.stopped.wait()
            except TimeoutError:
                pass
        await worker.close()

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        if not self._thread.is_alive():
            raise RuntimeError("the worker ended" if self._worker is None else self._worker.reason)

    def __call__(self) -> str:
        return self._name


class RayCluster:
    def __init__(
        self,
        make_engine: Callable[[], AsyncLLM],
        methods: Sequence[str],
        num_replicas: Mapping[str, int],  # role -> count
        address: str | None = None,  # of a Ray cluster; None: one on this machine, for as long as this process
        cpus: float = 1.0,  # of each worker
        gpus: float = 0.0,
        transport: str = "tcp",
    ) -> None:
        self._make_engine, self._methods, self._num_replicas = make_engine, methods, num_replicas
        self._address, self._resources = address, {"num_cpus": cpus, "num_gpus": gpus}
        self._transport = transport
        self._registry: Any = None
        self._roles: set[str] = set()  # that were started

    def start(self) -> None:
        """Returns when all workers are ready."""
        ray = _ray()
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
        if self._address is None:
            ray.init(include_dashboard=False, **options)
        else:
            _check_reachable(self._address)
            try:
                ray.init(address=self._address, **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise InvalidOptionError(f"no Ray cluster answers at {self._address!r}: {reason}") from error
        self._registry = ray.remote(Registry).options(name=REGISTRY, get_if_exists=True, num_cpus=0).remote()
        ray.serve.start(http_options={"location": "NoServer"})  # the server in front is ours
        for role, count in self._num_replicas.items():
            if count:
                self.scale(role, count)
        wanted = sum(self._num_replicas.values())
        end_s = time.monotonic() + START_TIMEOUT_S
        while (found := len(self.addresses())) < wanted:
            if time.monotonic() > end_s:
                self.end()
                each = ", ".join(f"{count:g} {name}" for name, count in self._resources.items() if count)
                raise WorkerStartError(
                    f"{found} of {wanted} workers came in {START_TIMEOUT_S:g} s: has Ray room for them ({each} each)?"
                )
            time.sleep(0.1)

    def scale(self, role: str, count: int) -> None:
        """So many workers of a role from now on."""
        self._roles.add(role)
        serve = _ray().serve
        deployment = serve.deployment(WorkerReplica).options(
            name=role, num_replicas=count, ray_actor_options=self._resources, health_check_period_s=2
        )
        replica = deployment.bind(role, self._make_engine, list(self._methods), self._transport)
        serve.run(replica, name=f"paceline-{role}", route_prefix=None)

    def addresses(self) -> list[tuple[str, int]]:
        found = _ray().get(self._registry.addresses.remote())
        return [(host, port) for host, port in found]

    def end(self) -> None:
        """Ends the workers; a Ray cluster that was there before stays."""
        ray = _ray()
        if not ray.is_initialized():
            return  # it could not be started
        for role in self._roles:
            ray.serve.delete(f"paceline-{role}")
        if self._registry is not None:
            ray.kill(self._registry)
        if self._address is None:
            ray.serve.shutdown()
        ray.shutdown()
