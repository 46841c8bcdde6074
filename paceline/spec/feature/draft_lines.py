"""Which slots hold the keys of a request, for drafts on a device: a line of a table there.

A draft appends the slots of the pairs that it takes in by itself. A request that is new here, or of which pairs came in
by another way, has its line written anew, from pinned memory and without waiting.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.spec.feature.feature_queue import FeatureQueue


@dataclass(slots=True)
class Line:
    row: int
    end: int = 0  # position after its last pair
    length: int = 0
    turn: int = 0  # when it was last drafted for


class DraftLines:
    def __init__(self, num_lines: int, max_length: int, num_pairs: int, device: torch.device) -> None:
        """`num_pairs`: as many as a draft takes in by itself."""
        on_cuda = device.type == "cuda"
        self.table = torch.zeros(num_lines, max_length, dtype=torch.int32, device=device)
        self._host = torch.zeros(num_lines, max_length, dtype=torch.int32, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._num_pairs = num_pairs
        self._lines: dict[str, Line] = {}
        self._free = list(range(num_lines))
        self._turn = 0

    def forget(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            self._free.append(line.row)

    def line(self, request: Request, first: int, num_pairs: int, queue: FeatureQueue) -> Line:
        """The line of a request, its newest pairs included: so many, from position `first` on. When none is left, that
        of the request drafted for longest ago is taken."""
        self._turn += 1
        end = len(request.token_ids) - 1
        line = self._lines.get(request.request_id)
        if line is None:
            line = self._lines[request.request_id] = Line(self._new_row())
        line.turn = self._turn
        if line.end == end:
            return line
        if line.end == first and 0 < num_pairs <= self._num_pairs and line.length:
            line.end, line.length = end, line.length + num_pairs
            return line
        context = queue.context(request)
        line.end, line.length = end, len(context)
        self._write(line.row, torch.from_numpy(context))
        return line

    def known(self, request: Request) -> Line | None:
        """Its line, where that holds all pairs up to its last token."""
        line = self._lines.get(request.request_id)
        return line if line is not None and line.length and line.end == len(request.token_ids) - 1 else None

    def follow(self, request: Request, begin: int, end: int) -> None:
        """The device has appended its pairs at positions [begin, end)."""
        line = self._lines.get(request.request_id)
        if line is not None and line.end == begin:
            self._turn += 1
            line.turn, line.end, line.length = self._turn, end, line.length + end - begin

    def _new_row(self) -> int:
        if not self._free:
            self.forget(min(self._lines, key=lambda name: self._lines[name].turn))
        return self._free.pop()

    def _write(self, row: int, context: Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # what was copied before has arrived: this row may be among it
        self._host[row, : len(context)] = context
        self.table[row, : len(context)].copy_(self._host[row, : len(context)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
