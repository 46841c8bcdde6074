"""A worker asked from outside how it is, and told to stop."""

import asyncio
from typing import Any

from paceline.cluster.transport import ChannelClosedError, UnreachableError, connect
from paceline.cluster.wire import Frame, Kind, ProtocolError

ANSWER_TIMEOUT_S = 5.0


async def ask(host: str, port: int, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """What it is and what it does; raises UnreachableError where no worker answers there."""
    channel = await connect(host, port)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.send(Frame(Kind.PING))
            return (await channel.receive()).meta
    except TimeoutError:
        raise UnreachableError(f"{host}:{port} takes connections but says nothing: is it a worker?") from None
    except (ProtocolError, ChannelClosedError) as error:
        raise UnreachableError(f"no worker answers at {host}:{port}: {error}") from error
    finally:
        channel.close()


def worker_row(figures: dict[str, Any]) -> dict[str, Any]:
    """For a table."""
    return {
        "worker": figures["worker_id"],
        "role": figures["role"],
        "process": figures["pid"],
        "running": figures["num_running"],
        "waiting": figures["num_waiting"],
        "KV in use": f"{figures['kv_usage']:.0%}",
        "blocks sent": figures["num_sent_blocks"],
        "fetched": figures["num_fetched_blocks"],
        "over": figures["transport"],
    }
