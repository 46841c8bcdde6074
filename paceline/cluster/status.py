"""A worker asked from outside how it is, and told to stop."""

from typing import Any

from paceline.cluster.transport import connect
from paceline.cluster.wire import Frame, Kind


async def ask(host: str, port: int) -> dict[str, Any]:
    """What it is and what it does; raises UnreachableError."""
    channel = await connect(host, port)
    try:
        await channel.send(Frame(Kind.PING))
        return (await channel.receive()).meta
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
    }
