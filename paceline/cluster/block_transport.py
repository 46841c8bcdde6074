"""How KV blocks travel between workers, by name. All that is not a block's bytes goes over TCP whatever the name is."""

import importlib.util
from typing import Protocol

from paceline.cluster.transport import Channel, connect
from paceline.errors import InvalidOptionError, MissingExtraError

TRANSPORTS = ("tcp", "nixl")


class BlockTransport(Protocol):
    name: str

    async def connect(self, host: str, port: int) -> Channel: ...  # to fetch blocks; raises UnreachableError

    def serving(self, channel: Channel) -> Channel: ...  # a connection that came in, and may ask for blocks

    def close(self) -> None: ...


class TcpBlocks:
    name = "tcp"

    async def connect(self, host: str, port: int) -> Channel:
        return await connect(host, port)

    def serving(self, channel: Channel) -> Channel:
        return channel

    def close(self) -> None:
        pass


def check_transport(name: str) -> None:
    """Before a model is loaded."""
    if name not in TRANSPORTS:
        raise InvalidOptionError(f"there is no transport {name!r}: choose one of {', '.join(TRANSPORTS)}")
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        raise MissingExtraError("transport nixl", "nixl", "nixl")


def make_transport(name: str) -> BlockTransport:
    check_transport(name)
    if name == "tcp":
        return TcpBlocks()
    from paceline.cluster.nixl_blocks import NixlBlocks

    return NixlBlocks()
