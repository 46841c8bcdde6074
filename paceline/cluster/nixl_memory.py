"""One NIXL agent (NVIDIA's transfer library: UCX, so RDMA where there is some, else shared memory or TCP) with memory
that it may use: pieces that others may read from, and pieces that this process reads into.

Only reads are used. So whatever a worker does wrong or too late, it can spoil only what another one is about to check,
and never memory that is in use there.
"""

import asyncio
import logging
import uuid
from typing import Any

import numpy as np

from paceline.errors import InvalidOptionError

logger = logging.getLogger("paceline.cluster")
# Blocks that wait to be read, and reads under way: a choice. Half: a sender waits for its reader twice as often. Twice:
# twice the memory (26 MB for both with the default model's 0.4 MB).
NUM_PIECES = 32
MAX_BYTES = 256 << 20  # of either: fewer pieces where blocks are longer than 8 MB
POLL_S = 2e-4  # between two looks at a read: 0.4 MB take 0.1 ms in shared memory, 10 ms over TCP


class NixlMemory:
    def __init__(self) -> None:
        self.name = uuid.uuid4().hex  # a worker that is started again is another one
        self.agent = _make_agent(self.name)
        self.out, self.into = Pieces(self.agent), Pieces(self.agent)
        self._agent_at: dict[tuple[str, int], str] = {}
        self.num_read = 0
        self._serving: asyncio.Task[None] | None = None
        self._unfinished: list[tuple[Any, int]] = []  # reads that nobody waits for any more, and where they write

    def metadata(self) -> bytes:
        """What another agent needs to read from `out`: after its memory was made."""
        return bytes(self.agent.get_agent_metadata())

    def serve(self) -> None:
        """Answer readers for as long as blocks wait to be read: not all that UCX uses lets them read by themselves."""
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while self.out.num_in_use:
            self.agent.get_new_notifs()  # there are none: it is the call that lets UCX do its work
            await asyncio.sleep(POLL_S)

    def meet(self, address: tuple[str, int], name: str, metadata: bytes) -> bool:
        """Know the agent of a worker at this address; the one that was there before is gone."""
        if self._agent_at.get(address) == name:
            return True
        self.forget(address)
        try:
            self.agent.add_remote_agent(metadata)
        except Exception as error:  # NIXL's errors have no class in common
            logger.warning("NIXL does not take the agent at %s:%d: %s", *address, error)
            return False
        self._agent_at[address] = name
        return True

    def forget(self, address: tuple[str, int]) -> None:
        if (name := self._agent_at.pop(address, None)) is not None:
            try:
                self.agent.remove_remote_agent(name)
            except Exception as error:
                logger.debug("NIXL could not remove an agent: %s", error)

    async def read(self, address: tuple[str, int], begin: int, size: int) -> bytes | None:
        """So many bytes of the memory of the worker there; None: they could not be read."""
        if (name := self._agent_at.get(address)) is None:
            return None
        while (piece := self._room(size)) is None:
            if not self.into.fits(size):
                return None
            await asyncio.sleep(POLL_S)
        try:
            handle = self._begin(name, begin, size, piece)
        except Exception as error:
            logger.warning("NIXL could not read from the worker at %s:%d: %s", *address, error)
            self.into.give_back(piece)
            self.forget(address)
            return None
        try:
            while (state := self._state(handle)) == "PROC":
                await asyncio.sleep(POLL_S)
            if state == "DONE":
                self.num_read += 1
                return self.into.get(piece, size)
            self.forget(address)
            return None
        finally:  # also when nobody waits for it any more: it still writes there
            self._unfinished.append((handle, piece))
            self._sweep()

    def _begin(self, name: str, begin: int, size: int, piece: int) -> Any:
        here = self.agent.get_xfer_descs([(self.into.address(piece), size, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(begin, size, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", here, there, name)
        self.agent.transfer(handle)
        return handle

    def _state(self, handle: Any) -> str:
        try:
            return str(self.agent.check_xfer_state(handle))
        except Exception as error:
            logger.info("a read of a KV block failed: %s", error)
            return "ERR"

    def _room(self, size: int) -> int | None:
        self._sweep()
        return self.into.take(size)

    def _sweep(self) -> None:
        still = []
        for handle, piece in self._unfinished:
            if self._state(handle) == "PROC":
                still.append((handle, piece))
                continue
            try:
                self.agent.release_xfer_handle(handle)
                self.into.give_back(piece)
            except Exception as error:  # its piece is not used again
                logger.warning("NIXL could not end a read: %s", error)
        self._unfinished = still

    def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self._sweep()
        for address in list(self._agent_at):
            self.forget(address)
        if not self._unfinished:  # else memory stays registered until the process ends
            self.out.close()
            self.into.close()


class Pieces:
    """Registered memory in equal pieces: made when the first block shows how long one is."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None  # [pieces, bytes]
        self._registered: Any = None
        self._free: list[int] = []

    @property
    def num_in_use(self) -> int:
        return 0 if self._memory is None else len(self._memory) - len(self._free)

    def fits(self, size: int) -> bool:
        return self._memory is None or size <= self._memory.shape[1]

    def take(self, size: int) -> int | None:
        """None: all are in use, or it does not fit."""
        if self._memory is None:
            self._memory = np.zeros((max(1, min(NUM_PIECES, MAX_BYTES // size)), size), np.uint8)
            region = (self._memory.ctypes.data, self._memory.nbytes, 0, "")
            self._registered = self._agent.register_memory([region], "DRAM")
            self._free = list(range(len(self._memory)))
        return self._free.pop() if self._free and self.fits(size) else None

    def give_back(self, piece: int) -> None:
        self._free.append(piece)

    def address(self, piece: int) -> int:
        assert self._memory is not None
        return int(self._memory[piece].ctypes.data)

    def put(self, piece: int, data: bytes) -> None:
        assert self._memory is not None
        self._memory[piece, : len(data)] = np.frombuffer(data, np.uint8)

    def get(self, piece: int, size: int) -> bytes:
        assert self._memory is not None
        return self._memory[piece, :size].tobytes()

    def close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None


def _make_agent(name: str) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise InvalidOptionError(f"transport nixl: its package cannot be loaded ({error}). Use tcp") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of its start on standard error
    try:
        # NIXL's own thread would spin on a core: `NixlMemory` looks after transfers while there are some.
        return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except Exception as error:
        raise InvalidOptionError(f"transport nixl: UCX cannot be started ({error!r}). Use tcp") from error
