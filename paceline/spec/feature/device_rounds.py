"""EAGLE's rounds on the device: walk, commit, draft, and the pass over the draft, as one CUDA graph for each size.

Between two rounds everything that the next one needs lies on the device: the inputs of the pass and its tokens
(models/static_inputs.py), its hidden states, the lines and budgets of the drafts (draft_inputs.py), and a few numbers
of each request (ops/rounds.py). Without CUDA the same parts run one by one, with the plain twins.
"""

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import PendingPass
from paceline.core.request import Request
from paceline.models.padded_decoder import PaddedDecoder, PassKind, StaticPass
from paceline.models.sent_ints import SentInts
from paceline.ops import rounds as plain_kernels
from paceline.ops.rounds import RoundState
from paceline.spec.feature.captured_drafts import BUCKETS, Answer, CapturedDrafts
from paceline.spec.feature.draft_levels import DraftShape
from paceline.spec.feature.draft_writer import Wanted
from paceline.spec.proposer import Budget
from paceline.spec.rounds import RoundResult

WantedOf = Callable[[Request, Budget], Wanted]


@dataclass(slots=True)
class RoundPass:
    """A `StaticPass` that begins where the last pass of its size ended."""

    rounds: "EagleRounds"
    shape: DraftShape
    size: int
    verify: StaticPass
    trees: Tensor | None = None  # [R, 1 + 3 * K] int32, after a launch
    graph: "torch.cuda.CUDAGraph | None" = None
    logits: Tensor | None = None  # never

    @property
    def hidden(self) -> Tensor | None:
        return self.verify.hidden

    def launch(self) -> None:
        if self.graph is None:
            self.launch_kernels()
        else:
            self.graph.replay()

    def launch_kernels(self) -> None:
        rounds, shape = self.rounds, self.shape
        drafts, target, kernels, state = rounds.drafts, rounds.target, rounds.kernels, rounds.state
        inputs, room = target.inputs(self.size), target.room
        count, most = shape.num_requests, drafts.room.num_nodes
        assert self.hidden is not None
        kernels.walk(
            inputs,
            state,
            drafts.views(shape),
            drafts.hidden_rows(shape),
            room.block_size,
            target.config.vocab_size,
            most,
        )
        kernels.move_accepted(inputs, state, room.kv_cache, room.block_size, count)
        self.trees = drafts.run_after(self.hidden, shape)
        kernels.write_rows(inputs, state, self.trees, shape.num_levels, room.block_size)
        self.verify.launch_kernels()

    @torch.no_grad()
    def capture(self) -> None:
        """Run once over padding, so that every kernel is compiled, then record."""
        self.rounds.target.inputs(self.size).fill_with_padding()
        self.rounds.state.flags.zero_()
        self.rounds.drafts.write_ahead(self.shape, [])
        self.launch_kernels()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch_kernels()
        self.graph = graph


@dataclass(slots=True)
class LaunchedRound:
    drafts: CapturedDrafts
    answer: Answer
    rows: PendingPass
    num_requests: int
    rows_each: int

    def collect(self) -> RoundResult:
        output = self.rows.collect()
        trees = self.drafts.read(self.answer, self.num_requests)
        tokens, each = output.tokens or [], self.rows_each
        own = [tokens[i * each : i * each + 1 + len(tree)] for i, tree in enumerate(trees)]
        return RoundResult(trees, own, output.hidden)


class EagleRounds:
    def __init__(
        self, drafts: CapturedDrafts, target: PaddedDecoder, hidden_layers: Sequence[int], wanted_of: WantedOf
    ) -> None:
        self.drafts, self.target = drafts, target
        self._kind, self._wanted_of = PassKind(False, tuple(hidden_layers)), wanted_of
        self.kernels = _kernels(target.device)
        self._most = drafts.room.max_requests
        self._sent = SentInts(2 * self._most, target.device)  # flags, roots
        sent = self._sent.device_ints.view(2, -1)
        self.state = RoundState.allocate(sent, self._most, drafts.room.num_pairs)
        self._passes: dict[DraftShape, RoundPass] = {}
        self._current: RoundPass | None = None
        self._num_requests = 0
        self._flags: list[bool] = []  # as the device has them

    @property
    def rows_each(self) -> int:
        return 1 + self.drafts.room.num_nodes

    def prepare(self, width: int) -> float:
        """Capture every number of requests, the largest first; returns the seconds that it took."""
        begin_s = time.perf_counter()
        for bucket in reversed([count for count in BUCKETS if count <= self._most]):
            shape = self.drafts.fit(bucket, width, self.drafts.room.num_levels)
            if self._size(shape) is not None:
                self._pass(shape)
        return time.perf_counter() - begin_s

    def least_size(self, num_requests: int, budget: Budget) -> int | None:
        shape = self._shape(num_requests, budget)
        if shape is None or (self.target.device.type == "cuda" and shape not in self._passes):
            return None  # capturing it now would overwrite what a pass on its way needs
        return self._size(shape)

    def begin(self, requests: Sequence[Request], budget: Budget, roots: Sequence[int]) -> bool:
        shape = self._shape(len(requests), budget)
        assert shape is not None, "least_size was asked before"
        if not all(self.drafts.suit(request) for request in requests):
            return False
        if not self.drafts.write_ahead(shape, [self._wanted_of(request, budget) for request in requests]):
            return False
        self._current, self._num_requests = self._pass(shape), len(requests)
        host = self._sent.hosts[self._sent.free()].view(2, -1)
        host.zero_()
        host[0, : len(roots)] = 1
        host[1, : len(roots)] = torch.tensor(roots, dtype=torch.int32)
        self._sent.send()
        self._flags = [True] * len(roots)
        return True

    def launch(self, is_alive: Sequence[bool], tables: NDArray[np.int32] | None) -> LaunchedRound:
        current = self._current
        assert current is not None, "`begin` comes first"
        if list(is_alive) != self._flags:
            self._flags = list(is_alive)
            host = self._sent.hosts[self._sent.free()]
            host[: len(is_alive)] = torch.tensor(self._flags, dtype=torch.int32)
            self._sent.send(len(is_alive))
        count = self._num_requests
        launched = self.target.launch_over(current, current.size, count * self.rows_each, tables)
        assert current.trees is not None
        answer = self.drafts.send_back(current.trees[:count])
        return LaunchedRound(self.drafts, answer, launched, count, self.rows_each)

    def _shape(self, num_requests: int, budget: Budget) -> DraftShape | None:
        room = self.drafts.room
        if num_requests > self._most or budget.num_nodes > room.num_nodes or budget.max_depth > room.num_levels:
            return None
        width = 1 if budget.num_nodes <= budget.max_depth else room.width
        shape = self.drafts.fit(num_requests, width, room.num_levels)
        return None if self._size(shape) is None else shape

    def _size(self, shape: DraftShape) -> int | None:
        sizes = self.target.sizes
        at = bisect.bisect_left(sizes, shape.num_requests * self.rows_each)
        return None if at == len(sizes) else sizes[at]

    def _pass(self, shape: DraftShape) -> RoundPass:
        found = self._passes.get(shape)
        if found is None:
            size = self._size(shape)
            assert size is not None
            found = RoundPass(self, shape, size, self.target.static_pass(size, self._kind))
            self._passes[shape] = found
            if self.target.device.type == "cuda":
                found.capture()
        return found


def _kernels(device: torch.device) -> Any:
    """`walk`, `move_accepted` and `write_rows`."""
    if device.type != "cuda":
        return plain_kernels
    from paceline.ops.triton import rounds as triton_kernels  # Triton is there where CUDA is

    return triton_kernels
