"""Both ends of a way for KV blocks, in one process, for tests."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from paceline.cluster.block_transport import BlockTransport, TcpBlocks, make_transport
from paceline.cluster.nixl_blocks import NixlBlocks


@dataclass(frozen=True)
class Way:
    holder: BlockTransport
    reader: BlockTransport

    def num_pieces_in_use(self) -> int:
        """Of NIXL's memory, at both ends."""
        ends = [end.memory for end in (self.holder, self.reader) if isinstance(end, NixlBlocks)]
        return sum(memory.out.num_in_use + memory.into.num_in_use for memory in ends)

    @contextlib.contextmanager
    def damaging(self, probability: float, seed: int) -> Iterator[None]:
        """Flips a bit of some blocks where NIXL reads them. What TCP carries is damaged by its own channel."""
        if not isinstance(self.holder, NixlBlocks):
            yield
            return
        out, dice = self.holder.memory.out, random.Random(seed)
        put = out.put

        def damaged(piece: int, data: bytes) -> None:
            if dice.random() < probability:
                at = dice.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
            put(piece, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(out, "put", damaged)
            yield


TCP = Way(TcpBlocks(), TcpBlocks())


@contextlib.contextmanager
def both_ends(name: str) -> Iterator[Way]:
    if name == "nixl":
        pytest.importorskip("nixl", reason="the package nixl is not installed (paceline[nixl])")
    way = Way(make_transport(name), make_transport(name))
    yield way
    way.holder.close()
    way.reader.close()
