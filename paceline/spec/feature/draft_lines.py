"""Which slots hold the keys of a request, for drafts on a device: a line of a table there.

A draft appends the slots of the pairs that it takes in by itself. A request that is new here, or of which pairs came in
by another way, has its line written anew, from pinned memory and without waiting.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from paceline.core.request import Request
from paceline.spec.feature.feature_queue import FeatureQueue, StepRows


@dataclass(slots=True)
class Line:
    row: int
    end: int  # position after its last pair
    length: int


class DraftLines:
    def __init__(self, num_lines: int, max_length: int, num_pairs: int, device: torch.device) -> None:
        """`num_pairs`: as many as a draft takes in by itself."""
        on_cuda = device.type == "cuda"
        self.table = torch.zeros(num_lines, max_length, dtype=torch.int32, device=device)
        self._host = torch.zeros(num_lines, max_length, dtype=torch.int32, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._num_pairs = num_pairs
        self._lines: OrderedDict[str, Line] = OrderedDict()  # least recently drafted for first
        self._free = list(range(num_lines))

    def forget(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            self._free.append(line.row)

    def line(self, request: Request, newest: StepRows, queue: FeatureQueue) -> Line:
        """The line of a request, its newest pairs included. When none is left, that of the request drafted for longest
        ago is taken."""
        name, end = request.request_id, request.num_tokens - 1
        line = self._lines.get(name)
        if line is not None:
            self._lines.move_to_end(name)
            if line.end == end:
                return line
            begin, stop = newest.spans[name]
            if stop - begin <= self._num_pairs and line.end == newest.positions[begin]:
                line.end, line.length = end, line.length + stop - begin
                return line
        else:
            if not self._free:
                self.forget(next(iter(self._lines)))
            line = self._lines[name] = Line(self._free.pop(), 0, 0)
        context = queue.context(request)
        line.end, line.length = end, len(context)
        self._write(line.row, torch.from_numpy(context))
        return line

    def _write(self, row: int, context: torch.Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # what was copied before has arrived: this row may be among it
        self._host[row, : len(context)] = context
        self.table[row, : len(context)].copy_(self._host[row, : len(context)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
