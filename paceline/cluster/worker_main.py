"""The life of a worker process: say where it listens, serve, and end when told to or when its parent is gone."""

import asyncio
import json
import logging
import signal
from collections.abc import Sequence

from paceline.cluster.block_transport import make_transport
from paceline.cluster.engine_seam import EngineSeam
from paceline.cluster.local import REFUSED
from paceline.cluster.parent import Parent
from paceline.cluster.worker import Worker
from paceline.cluster.zmq_events import ZmqEvents
from paceline.llm import AsyncLLM

logger = logging.getLogger("paceline.cluster")
DRAIN_TIMEOUT_S = 60.0  # after SIGTERM, for the requests it has


async def run_worker(
    llm: AsyncLLM,
    methods: list[str],
    role: str,
    name: str,
    host: str,
    port: int,
    parent: Parent | None,
    events: Sequence[str] = (),  # endpoints to publish KV events at: of the batches, and of their replay
    transport: str = "tcp",
) -> int:
    """Until it is stopped; returns the exit code."""
    seam = await EngineSeam.make(llm, methods)
    worker = Worker(seam, role, name, make_transport(transport))
    loop = asyncio.get_running_loop()

    def on_death(error: Exception) -> None:
        loop.call_soon_threadsafe(worker.stop, f"the engine died: {error}")

    llm.on_death = on_death
    published = ZmqEvents(worker.log, *events) if events else None
    if published is not None:
        worker.subscribers.append(published.publish)
    await worker.start(host, port)
    print(json.dumps({"worker": name, "role": role, "port": worker.port}), flush=True)
    if parent is not None:
        parent.when_gone(lambda: loop.call_soon_threadsafe(worker.stop, "its parent is gone"))
    draining: list[asyncio.Task[None]] = []
    loop.add_signal_handler(
        signal.SIGTERM, lambda: draining.append(loop.create_task(worker.drain(DRAIN_TIMEOUT_S, "told to leave")))
    )
    await worker.stopped.wait()
    logger.info("worker %s ends: %s", name, worker.reason)
    await worker.close()
    if published is not None:
        published.close()
    if worker.reason.startswith("refused"):
        return REFUSED
    if llm.death is None or "shut down" in str(llm.death):
        seam.check_integrity()
        return 0
    return 1
