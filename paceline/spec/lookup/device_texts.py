"""The tokens of requests on the device: a line of a table for each, to which rounds append by themselves.

When a request goes on in rounds, what the host knows and the device was not sent yet is sent: one copy for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.request import Request
from paceline.models.sent_ints import SentInts

SENT_TOKENS = 16384  # at a time: a few prompts


@dataclass(slots=True)
class Line:
    row: int
    end: int = 0  # tokens that were sent
    turn: int = 0  # when it was last asked for


class DeviceTexts:
    def __init__(self, num_lines: int, max_length: int, device: torch.device, kernels: Any) -> None:
        self.tokens = torch.zeros(num_lines, max_length, dtype=torch.int32, device=device)
        self._sent = SentInts(4 * num_lines + SENT_TOKENS, device)
        self._kernels = kernels
        self._lines: dict[str, Line] = {}
        self._free = list(range(num_lines))
        self._turn = 0

    def forget(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            self._free.append(line.row)

    def bring(self, requests: Sequence[Request]) -> list[int]:
        """The lines of these requests, at most as many as there are; all their tokens are there or on their way."""
        self._turn += 1
        lines = [self._line(request.request_id) for request in requests]
        parts: list[tuple[int, int, list[int]]] = []
        num_tokens = 0
        for request, line in zip(requests, lines, strict=True):
            while line.end < len(request.token_ids):
                part = request.token_ids[line.end : line.end + SENT_TOKENS - num_tokens]
                parts.append((line.row, line.end, part))
                line.end, num_tokens = line.end + len(part), num_tokens + len(part)
                if num_tokens == SENT_TOKENS or len(parts) == len(self.tokens):
                    self._send(parts)
                    parts, num_tokens = [], 0
        self._send(parts)
        return [line.row for line in lines]

    def _line(self, name: str) -> Line:
        """The line of a request; where none is left, that of the one which was asked for longest ago."""
        line = self._lines.get(name)
        if line is None:
            if not self._free:
                self.forget(min(self._lines, key=lambda other: self._lines[other].turn))
            line = self._lines[name] = Line(self._free.pop())
        line.turn = self._turn
        return line

    def _send(self, parts: Sequence[tuple[int, int, list[int]]]) -> None:
        if not parts:
            return
        host = self._sent.hosts[self._sent.free()].numpy()
        end = 4 * len(parts)
        for i, (row, first, part) in enumerate(parts):
            host[4 * i : 4 * i + 4] = row, first, len(part), end
            host[end : end + len(part)] = part
            end += len(part)
        self._sent.send(end)
        self._kernels.store_parts(self._sent.device_ints, len(parts), self.tokens)
