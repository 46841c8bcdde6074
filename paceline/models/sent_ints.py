"""Ints on a device at an address that stays, filled by one copy from pinned memory.

There are two buffers on the host: one may be written while the device still reads the other. A few ints that lie
apart are sent one by one, which is quicker than all that lies between them.

    sent = SentInts(1000, device)
    sent.hosts[sent.free()][:3] = torch.tensor([1, 2, 3], dtype=torch.int32)
    sent.send(3)
"""

from collections.abc import Sequence

import torch

NUM_HOST_BUFFERS = 2


class SentInts:
    def __init__(self, num_ints: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self.hosts = [torch.zeros(num_ints, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_HOST_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_HOST_BUFFERS
        if pinned:
            self._copied = [torch.cuda.Event() for _ in self.hosts]  # type: ignore[no-untyped-call]
        self._turn = 0

    def free(self) -> int:
        """Which of `hosts` may be written now: the device has read what it held before. `send` sends it."""
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._turn

    def send(self, num_ints: int | None = None, begin: int = 0) -> None:
        """The ints from `begin` on to `num_ints`, or all; without waiting for them to arrive."""
        self._copy(begin, num_ints)
        self._end_turn()

    def send_each(self, places: Sequence[int]) -> None:
        """Only the ints at these places."""
        for place in places:
            self._copy(place, place + 1)
        self._end_turn()

    def _copy(self, begin: int, end: int | None) -> None:
        self.device_ints[begin:end].copy_(self.hosts[self._turn][begin:end], non_blocking=True)

    def _end_turn(self) -> None:
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record()
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
