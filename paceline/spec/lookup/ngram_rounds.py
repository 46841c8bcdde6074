"""`ngram` in rounds on the device: the same trees as ngram.py's, found by comparing instead of by an index."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.models.sent_ints import SentInts
from paceline.ops import lookup as plain_kernels
from paceline.ops.lookup import CHUNK, num_chunks
from paceline.ops.rounds import RoundState
from paceline.spec.lookup.device_texts import DeviceTexts
from paceline.spec.round_draft import RoundRoom, Walked, WalkedRoom
from paceline.spec.rounds import RoundSize


class NgramRoundDraft:
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, sizes: range, room: RoundRoom, max_length: int, device: torch.device) -> None:
        """`sizes`: of n-grams."""
        self.room, self._sizes = room, sizes
        self._kernels = _kernels(device)
        count, chunks = room.max_requests, num_chunks(max_length)
        self._texts = DeviceTexts(count, max_length, device, self._kernels)
        self._lines = SentInts(count, device)  # of the requests in rounds, in order
        self._walked = WalkedRoom(room, device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._keys, self._bests = ints(count, chunks * CHUNK), ints(count, chunks)
        self._trees = ints(count, 1 + 3 * room.num_nodes)

    def begin(self, size: RoundSize, requests: Sequence[Request]) -> bool:
        rows = self._texts.bring(requests)
        self._lines.hosts[self._lines.free()][: len(rows)] = torch.tensor(rows, dtype=torch.int32)
        self._lines.send(len(rows))
        return True

    def walked(self, size: RoundSize) -> Walked:
        return self._walked.walked(size.num_requests)

    def draft(self, size: RoundSize, state: RoundState, hidden: Tensor | None) -> Tensor:
        count, budget, kernels, texts = size.num_requests, size.budget, self._kernels, self._texts.tokens
        lines, keys, bests = self._lines.device_ints[:count], self._keys[:count], self._bests[:count]
        trees = self._trees[:count]
        kernels.append_walked(self.walked(size).pairs, lines, texts)
        kernels.find_places(texts, lines, state, keys, bests, self._sizes[0], self._sizes[-1])
        kernels.copy_paths(texts, lines, state, keys, bests, trees, budget.num_nodes, budget.max_depth)
        return trees

    def forget(self, name: str) -> None:
        self._texts.forget(name)


def _kernels(device: torch.device) -> Any:
    """As ops/lookup.py."""
    if device.type != "cuda":
        return plain_kernels
    from paceline.ops.triton import lookup as triton_kernels  # Triton is there where CUDA is

    return triton_kernels
