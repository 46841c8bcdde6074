"""Trees on their way from the device to the host, without a wait until somebody needs them.

answers = TreeAnswers(max_requests, num_nodes, device)
answer = answers.send_back(trees[:count])  # [requests, 1 + 3 * K] int32, see `read_trees`
answers.read(answer, count)
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.tree import EMPTY_TREE, DraftTree


@dataclass(frozen=True, slots=True)
class Answer:
    """Where trees arrive on the host."""

    ints: Tensor  # [max_requests, 1 + 3 * K] int32, pinned
    arrived: "torch.cuda.Event | None"

    def wait(self) -> None:
        """The one place where the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()


class TreeAnswers:
    def __init__(self, max_requests: int, num_nodes: int, device: torch.device) -> None:
        self._shape, self._device = (max_requests, 1 + 3 * num_nodes), device
        self._free: list[Answer] = []

    @property
    def num_free(self) -> int:
        """Of those that were made: what was read into is used again."""
        return len(self._free)

    def send_back(self, output: Tensor) -> Answer:
        """`read` waits for them."""
        answer = self._free.pop() if self._free else self._new()
        answer.ints[: len(output)].copy_(output, non_blocking=True)
        if answer.arrived is not None:
            answer.arrived.record()
        return answer

    def read(self, answer: Answer, count: int) -> list[DraftTree]:
        """To be called once."""
        answer.wait()
        trees = read_trees(answer.ints[:count].numpy())
        self._free.append(answer)
        return trees

    def _new(self) -> Answer:
        on_cuda = self._device.type == "cuda"
        ints = torch.zeros(self._shape, dtype=torch.int32, pin_memory=on_cuda)
        return Answer(ints, torch.cuda.Event() if on_cuda else None)  # type: ignore[no-untyped-call]


def read_trees(rows: NDArray[np.int32]) -> list[DraftTree]:
    """[requests, 1 + 3 * K]: of each its number of nodes, then their tokens, parents, and the bits of the
    log-probabilities that the drafter gives them."""
    most = (rows.shape[1] - 1) // 3
    counts = rows[:, 0].tolist()
    longest = max(counts)
    tokens, parents = rows[:, 1 : 1 + longest].tolist(), rows[:, 1 + most : 1 + most + longest].tolist()
    log_probs = np.ascontiguousarray(rows[:, 1 + 2 * most : 1 + 2 * most + longest]).view(np.float32)
    confidence = np.exp(log_probs, dtype=np.float64).tolist()
    if min(counts) == longest > 0:  # as chains nearly always are
        return [DraftTree(*lists[:2], confidence=lists[2]) for lists in zip(tokens, parents, confidence, strict=True)]
    return [
        DraftTree(tokens[i][:count], parents[i][:count], confidence=confidence[i][:count]) if count else EMPTY_TREE
        for i, count in enumerate(counts)
    ]
