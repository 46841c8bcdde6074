"""Rounds on the device: walk, commit, draft, and the pass over the draft, as one CUDA graph for each size.

Between two rounds everything that the next one needs lies on the device: the inputs of the pass and its tokens
(models/static_inputs.py), its hidden states, a few numbers of each request (ops/rounds.py), and whatever the drafter
keeps (round_draft.py). Without CUDA the same parts run one by one, with the plain twins.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import PendingPass
from paceline.core.request import Request
from paceline.models.graphs import record
from paceline.models.padded_decoder import PaddedDecoder, PassKind, StaticPass
from paceline.models.sent_ints import SentInts
from paceline.ops import rounds as plain_kernels
from paceline.ops.rounds import RoundState
from paceline.spec.buckets import BUCKETS
from paceline.spec.proposer import Budget
from paceline.spec.round_draft import RoundDraft
from paceline.spec.round_sizes import RoundSizes, SizeOption
from paceline.spec.rounds import RoundResult, RoundSize
from paceline.spec.tree_answers import Answer, TreeAnswers

NUM_TIMED = 8  # runs of a size, when it is measured


@dataclass(slots=True)
class RoundPass:
    """A `StaticPass` that begins where the last pass of its size ended."""

    rounds: "CapturedRounds"
    size: RoundSize
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
        rounds, size = self.rounds, self.size
        draft, target, kernels, state = rounds.draft, rounds.target, rounds.kernels, rounds.state
        inputs, block_size, budget = target.inputs(size.num_rows), target.room.block_size, size.budget
        walked = draft.walked(size)
        kernels.walk(inputs, state, *walked, block_size, target.config.vocab_size, budget.num_nodes)
        kernels.move_accepted(inputs, state, target.room.kv_cache, block_size, size.num_requests)
        self.trees = draft.draft(size, state, self.hidden)
        kernels.write_rows(inputs, state, self.trees, size.rows_each, budget.max_depth, block_size)
        self.verify.launch_kernels()

    def fill_with_padding(self) -> None:
        """Then it may run: it reads no keys and writes none."""
        self.rounds.target.inputs(self.size.num_rows).fill_with_padding()
        self.rounds.state.flags.zero_()
        self.rounds.draft.begin(self.size, [])

    @torch.no_grad()
    def capture(self) -> None:
        """Run once over padding, so that every kernel is compiled, then record."""
        self.fill_with_padding()
        self.graph = record(self.launch_kernels)


@dataclass(slots=True)
class LaunchedRound:
    answers: TreeAnswers
    answer: Answer
    rows: PendingPass
    num_requests: int
    rows_each: int

    def collect(self) -> RoundResult:
        output = self.rows.collect()
        trees = self.answers.read(self.answer, self.num_requests)
        tokens, each = output.tokens or [], self.rows_each
        own = [tokens[i * each : i * each + 1 + len(tree)] for i, tree in enumerate(trees)]
        return RoundResult(trees, own, output.hidden)


class CapturedRounds:
    def __init__(self, draft: RoundDraft, target: PaddedDecoder) -> None:
        self.draft, self.target = draft, target
        self.sizes: RoundSizes | None = None  # by price, once they were measured; None: as large as was asked for
        self._kind = PassKind(False, draft.hidden_layers)
        self.kernels = _kernels(target.device)
        room, device = draft.room, target.device
        self._sent = SentInts(2 * room.max_requests, device)  # flags, roots
        self._answers = TreeAnswers(room.max_requests, room.num_nodes, device)
        self.state = RoundState.allocate(self._sent.device_ints.view(2, -1), room.max_requests, room.num_pairs)
        self._passes: dict[RoundSize, RoundPass] = {}
        self._current: RoundPass | None = None
        self._num_requests = 0
        self._flags: list[bool] = []  # as the device has them

    @property
    def current_size(self) -> RoundSize | None:
        """Of the group that began last."""
        return None if self._current is None else self._current.size

    def prepare(self, budgets: Sequence[Budget]) -> None:
        """Capture rounds of these sizes for every number of requests, the largest first."""
        for count in reversed(self._buckets):
            for budget in budgets:
                self._pass_of(self._size(count, budget))

    def prepare_by_price(self, options: Sequence[SizeOption]) -> None:
        """The same for all of these, and measure them: from now on the size that pays is taken."""
        self.prepare([option.budget for option in options])
        times: dict[int, list[float | None]] = {}
        for count in self._buckets:
            num_rows = self.target.size_for(count)
            if num_rows is not None:
                plain = self.target.static_pass(num_rows, self._kind._replace(hidden_layers=()))
                self.target.inputs(num_rows).fill_with_padding()
                times[count] = [self._seconds(plain)]
                for option in options:
                    found = self._pass_of(self._size(count, option.budget))
                    if found is not None:
                        found.fill_with_padding()
                    times[count].append(None if found is None else self._seconds(found))
        self.sizes = RoundSizes(times, options)

    def plan(self, num_requests: int, budget: Budget) -> RoundSize | None:
        if self.sizes is not None:
            option = self.sizes.choose(num_requests)
            if option is None:
                return None
            budget = option.budget
        size = self._size(num_requests, budget)
        if size is None or (self.target.device.type == "cuda" and size not in self._passes):
            return None  # capturing it now would overwrite what a pass on its way needs
        return size

    def begin(self, requests: Sequence[Request], size: RoundSize, roots: Sequence[int]) -> bool:
        current = self._pass(size)
        if not self.draft.begin(size, requests):
            return False
        self._current, self._num_requests = current, len(requests)
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
        count, size = self._num_requests, current.size
        launched = self.target.launch_over(current, size.num_rows, count * size.rows_each, tables)
        assert current.trees is not None
        answer = self._answers.send_back(current.trees[:count])
        return LaunchedRound(self._answers, answer, launched, count, size.rows_each)

    @property
    def _buckets(self) -> list[int]:
        return [count for count in BUCKETS if count <= self.draft.room.max_requests]

    def _size(self, num_requests: int, budget: Budget) -> RoundSize | None:
        room = self.draft.room
        count = next((count for count in self._buckets if count >= num_requests), None)
        if count is None or budget.num_nodes > room.num_nodes or budget.max_depth > room.num_levels:
            return None
        num_rows = self.target.size_for(count * (1 + budget.num_nodes))
        return None if num_rows is None else RoundSize(count, budget, num_rows)

    def _pass_of(self, size: RoundSize | None) -> RoundPass | None:
        return None if size is None else self._pass(size)

    def _pass(self, size: RoundSize) -> RoundPass:
        found = self._passes.get(size)
        if found is None:
            found = RoundPass(self, size, self.target.static_pass(size.num_rows, self._kind))
            self._passes[size] = found
            if self.target.device.type == "cuda":
                found.capture()
        return found

    def _seconds(self, one: StaticPass) -> float:
        """Over padding, which reads no keys: rounds correct it while they run."""
        if self.target.device.type != "cuda":
            begin_s = time.perf_counter()
            one.launch()
            return time.perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        one.launch()
        begin.record()
        for _ in range(NUM_TIMED):
            one.launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / NUM_TIMED


def _kernels(device: torch.device) -> Any:
    """`walk`, `move_accepted` and `write_rows`."""
    if device.type != "cuda":
        return plain_kernels
    from paceline.ops.triton import rounds as triton_kernels  # Triton is there where CUDA is

    return triton_kernels
