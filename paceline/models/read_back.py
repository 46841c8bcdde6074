"""Tokens on their way from the device to the host, without a wait until somebody needs them.

read_back = read_backs.next(times_device=False)
read_back.begin()  # before the pass is launched
...
read_back.read(picked, num_rows)  # after it
read_back.wait()  # [2, num_rows] int32 on the host
"""

import torch
from torch import Tensor

NUM_BUFFERS = 3  # two passes may be on their way, and a third be read


class ReadBack:
    def __init__(self, num_ints: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.empty(num_ints, dtype=torch.int32, pin_memory=on_cuda)
        self._events: list[torch.cuda.Event] = []  # when the pass began, when it ended, when its tokens arrived
        if on_cuda:
            timed = (True, True, False)
            self._events = [torch.cuda.Event(enable_timing=timing) for timing in timed]  # type: ignore[no-untyped-call]
        self._view = self._host.view(2, -1)
        self.times_device = False

    def begin(self) -> None:
        if self._events and self.times_device:
            self._events[0].record()

    def read(self, picked: Tensor, num_rows: int) -> "ReadBack":  # picked: [2, at least num_rows]
        if self._events and self.times_device:
            self._events[1].record()
        whole = self._host[: picked.numel()].view(2, -1)
        whole.copy_(picked, non_blocking=True)
        self._view = whole[:, :num_rows]
        if self._events:
            self._events[2].record()
        return self

    def wait(self) -> Tensor:
        """The one place where the host waits for the device."""
        if self._events:
            self._events[2].synchronize()
        return self._view

    def device_s(self) -> float:
        """From the launch of the pass to its end, after `wait`."""
        if not (self._events and self.times_device):
            return 0.0
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return milliseconds / 1e3


class ReadBacks:
    """Buffers that take turns: one is free again when its tokens have arrived."""

    def __init__(self, num_ints: int, device: torch.device) -> None:
        self._all = [ReadBack(num_ints, device) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def next(self, times_device: bool) -> ReadBack:
        self._turn = (self._turn + 1) % len(self._all)
        chosen = self._all[self._turn]
        chosen.wait()  # a pass that nobody collected: its requests had ended
        chosen.times_device = times_device
        return chosen
