"""Whole EAGLE-3 drafts in one CUDA graph: what native_drafts.py is on a CPU.

A graph takes in the newest pairs of its requests, grows their trees (draft_levels.py) and leaves them in one array. The
host sends one array of ints, launches, and reads one array back. Longer stretches of pairs, as of prompts, are taken in
beforehand, kernel by kernel.

Which slots hold a request's keys is kept on the device (`table`): a draft appends the slots of the pairs that it takes
in. A request that is new here, or of which pairs came in by another way, has its line written anew.

Without CUDA the same function runs without a graph.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.forward import Target
from paceline.core.request import Request
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.models.drafters.eagle3 import Eagle3
from paceline.models.drafters.paged import Layers, TorchLayers
from paceline.ops.random import Purpose, noise_keys
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.draft_inputs import DraftInputs
from paceline.spec.feature.draft_levels import DraftNetwork, DraftOps, DraftShape, draft, plain_attend, plain_top
from paceline.spec.feature.draft_scores import LOWEST, DraftScores
from paceline.spec.feature.feature_queue import FeatureQueue, StepRows
from paceline.spec.proposer import Budget

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # requests of a graph
NUM_LINES = 2 * BUCKETS[-1]  # of the table; when all are in use, that of the request drafted for longest ago is taken


def scratch_slots(width: int, max_depth: int) -> int:
    """Behind the target's slots: the nodes of a full bucket, and one slot that padding writes to."""
    return BUCKETS[-1] * width * max_depth + 1


@dataclass(slots=True)
class DraftClock:
    """Seconds of the host by part, since the start; the first draft of a shape, which is captured, in `capture_s`."""

    num_drafts: int = 0
    prepare_s: float = 0.0  # collecting and sending the inputs
    launch_s: float = 0.0
    read_s: float = 0.0  # waiting for the device
    trees_s: float = 0.0
    num_captured: int = 0
    capture_s: float = 0.0


DRAFT_CLOCK = DraftClock()  # of all drafters of the process, for measurements


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to draft for."""

    request: Request
    budget: Budget
    width: int
    lowest: float  # log-probability from which a path is kept
    followed: float  # and from which it is extended


@dataclass(slots=True)
class _Line:
    """A request's line of the table."""

    row: int
    end: int  # position after its last pair
    length: int


@dataclass(slots=True)
class _Graph:
    inputs: DraftInputs
    hidden: Tensor  # [R * F, layers * hidden]
    output: Tensor | None = None  # [R, 1 + 3 * K] int32
    graph: "torch.cuda.CUDAGraph | None" = None


class CapturedDrafts:
    def __init__(
        self,
        network: DraftNetwork,
        ops: DraftOps,
        layers: TorchLayers,
        scores: DraftScores,
        services: EngineParts,
        largest: Budget,
        width: int,
    ) -> None:
        self._network, self._ops, self._scores, self._width = network, ops, scores, width
        self._kv = layers.kv_cache[0]  # [2, slots, kv heads, dim]
        self._device = self._kv.device
        self._first_scratch, self._trash = services.num_slots, self._kv.shape[1] - 1
        self._largest, self.num_pairs = largest, largest.max_depth + 1
        columns = services.max_model_len + self.num_pairs
        self._table = torch.zeros(NUM_LINES + 1, columns, dtype=torch.int32, device=self._device)  # last: padding's
        self._id_constants = torch.from_numpy(scores.id_constants.view(np.int32).copy()).to(self._device)
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # least recently drafted for first
        self._free = list(range(NUM_LINES))
        self._graphs: dict[DraftShape, _Graph] = {}
        self._inputs: dict[tuple[int, int], tuple[DraftInputs, Tensor]] = {}
        on_cuda = self._device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        size = BUCKETS[-1] * (1 + 3 * largest.num_nodes)
        self._read = torch.empty(size, dtype=torch.int32, pin_memory=on_cuda)

    @staticmethod
    def of(
        network: Any,
        target: Target,
        layers: Layers,
        scores: DraftScores,
        services: EngineParts,
        largest: Budget,
        width: int,
    ) -> "CapturedDrafts | None":
        """None where the network is another one or not on CUDA, or tokens are drawn from its probabilities."""
        if not isinstance(network, Eagle3) or services.device.type != "cuda" or scores.sampling == "sampled":
            return None
        if min(largest.num_nodes, largest.max_depth) < 1 or not isinstance(layers, TorchLayers):
            return None
        from paceline.ops.triton.draft_attention import attend_paths  # Triton is there where CUDA is
        from paceline.ops.triton.draft_top import likeliest_tokens

        joined = DraftNetwork(network, target, target.dtype, *layers.angles)
        ops = DraftOps(attend_paths, likeliest_tokens)
        return CapturedDrafts(joined, ops, layers, scores, services, largest, width)

    @staticmethod
    def plain(
        network: Eagle3,
        target: Target,
        layers: TorchLayers,
        scores: DraftScores,
        services: EngineParts,
        largest: Budget,
        width: int,
    ) -> "CapturedDrafts":
        """The twin in plain PyTorch, on any device, in float32."""
        joined = DraftNetwork(network, target, torch.float32, *layers.angles)
        return CapturedDrafts(joined, DraftOps(plain_attend, plain_top), layers, scores, services, largest, width)

    def suit(self, request: Request) -> bool:
        return self._scores.is_plain(request) or self._scores.is_noise_only(request)

    def forget(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            self._free.append(line.row)

    def grow(self, wanted: Sequence[Wanted], newest: StepRows, queue: FeatureQueue) -> list[DraftTree]:
        """Trees. The newest rows of all these requests were left out of the queue and marked."""
        trees: list[DraftTree] = []
        for begin in range(0, len(wanted), BUCKETS[-1]):
            trees += self._grow(wanted[begin : begin + BUCKETS[-1]], newest, queue)
        return trees

    def _grow(self, wanted: Sequence[Wanted], newest: StepRows, queue: FeatureQueue) -> list[DraftTree]:
        begin_s = time.perf_counter()
        noisy = [not self._scores.is_plain(one.request) for one in wanted]
        shape = DraftShape(
            next(size for size in BUCKETS if size >= len(wanted)),
            self._width if any(one.width > 1 for one in wanted) else 1,
            max(one.budget.max_depth for one in wanted),
            self._largest.num_nodes,
            any(noisy),
        )
        found = self._graphs.get(shape) or self._make(shape, newest.hidden)
        self._write(found.inputs, shape, wanted, noisy, newest, queue)
        found.inputs.send()
        flat = newest.hidden.flatten(1)
        torch.index_select(flat, 0, found.inputs.hidden_rows, out=found.hidden)
        sent_s = time.perf_counter()
        output = self._launch(found, shape)
        launched_s = time.perf_counter()
        host = self._read[: output.numel()].view(output.shape)
        host.copy_(output, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        read_s = time.perf_counter()
        trees = read_trees(host.numpy()[: len(wanted)])
        clock = DRAFT_CLOCK
        clock.num_drafts += 1
        clock.prepare_s += sent_s - begin_s
        clock.launch_s += launched_s - sent_s
        clock.read_s += read_s - launched_s
        clock.trees_s += time.perf_counter() - read_s
        return trees

    def _make(self, shape: DraftShape, hidden: Tensor) -> _Graph:
        key = (shape.num_requests, shape.num_levels)
        if key not in self._inputs:
            inputs = DraftInputs(shape.num_requests, self.num_pairs, shape.num_levels, self._device)
            room = hidden.new_zeros(shape.num_requests * self.num_pairs, hidden.shape[1] * hidden.shape[2])
            self._inputs[key] = inputs, room
        made = self._graphs[shape] = _Graph(*self._inputs[key])
        return made

    def _launch(self, found: _Graph, shape: DraftShape) -> Tensor:
        if found.graph is None:
            found.output = self._draft(found, shape)
            if self._device.type == "cuda":
                self._capture(found, shape)
        if found.graph is not None:
            found.graph.replay()
        assert found.output is not None
        return found.output

    def _capture(self, found: _Graph, shape: DraftShape) -> None:
        """The draft has just run, so every kernel is compiled; to run it again changes nothing."""
        begin_s = time.perf_counter()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found.output = self._draft(found, shape)
        found.graph = graph
        DRAFT_CLOCK.num_captured += 1
        DRAFT_CLOCK.capture_s += time.perf_counter() - begin_s

    def _draft(self, found: _Graph, shape: DraftShape) -> Tensor:
        views = found.inputs.views(found.hidden, self._table, self._id_constants if shape.noisy else None)
        return draft(self._network, self._ops, self._kv, views, shape, self._first_scratch)

    def _write(
        self,
        inputs: DraftInputs,
        shape: DraftShape,
        wanted: Sequence[Wanted],
        noisy: Sequence[bool],
        newest: StepRows,
        queue: FeatureQueue,
    ) -> None:
        host, count, most = inputs.host(), len(wanted), self.num_pairs
        spans = np.array([newest.spans[one.request.request_id] for one in wanted], dtype=np.int32)
        counts = np.minimum(spans[:, 1] - spans[:, 0], most)
        lines = [self._line(one.request, newest, queue) for one in wanted]
        lengths = np.array([line.length for line in lines], dtype=np.int32)
        host["counts"][:] = 1  # padding has one pair, in its own slot and line
        host["counts"][:count] = counts
        host["table_rows"][:] = NUM_LINES
        host["table_rows"][:count] = [line.row for line in lines]
        host["begins"][:count] = lengths - counts
        host["last_positions"][:count] = newest.positions[spans[:, 1] - 1]
        host["widths"][:count] = [one.width for one in wanted]
        host["depths"][:count] = [one.budget.max_depth for one in wanted]
        host["num_nodes"][:count] = [one.budget.num_nodes for one in wanted]
        host["lowest"].view(np.float32)[:count] = [max(LOWEST / 2, one.lowest) for one in wanted]
        host["followed"].view(np.float32)[:count] = [one.followed for one in wanted]
        # [requests, pairs]: the last ones of each request, and where there are fewer its last one again
        places = np.minimum((spans[:, 1] - counts)[:, None] + np.arange(most), spans[:, 1:] - 1)
        host["hidden_rows"][:count] = newest.rows[places]
        host["positions"][:count] = newest.positions[places]
        host["next_tokens"][:count] = newest.next_tokens[places]
        host["slots"][:] = self._trash
        host["slots"][:count] = np.where(np.arange(most) < counts[:, None], newest.slots[places], self._trash)
        if any(noisy):
            heats = [one.request.sampling_params.temperature for one in wanted]
            host["scales"].view(np.float32)[:count] = np.where(noisy, 1.0 / np.maximum(heats, 1e-9), 0.0)
            seeds = np.array([one.request.seed & ((1 << 64) - 1) for one in wanted], dtype=np.uint64)
            ends = np.array([one.request.num_tokens for one in wanted], dtype=np.uint64)
            at = np.add.outer(ends, np.arange(shape.num_levels, dtype=np.uint64), dtype=np.uint64)
            keys = noise_keys(seeds[:, None], at, Purpose.SAMPLE)
            host["noise_keys"][:count] = keys.astype("<u8").view("<i4").reshape(count, -1, 2)

    def _line(self, request: Request, newest: StepRows, queue: FeatureQueue) -> _Line:
        name, end = request.request_id, request.num_tokens - 1
        begin, stop = newest.spans[name]
        first = int(newest.positions[begin])
        line = self._lines.get(name)
        if line is not None:
            self._lines.move_to_end(name)
            if line.end == end:
                return line
            if line.end == first and stop - begin <= self.num_pairs:
                line.end, line.length = end, line.length + stop - begin
                return line
        context = queue.context(request)
        if line is None:
            line = self._lines[name] = _Line(self._new_row(), 0, 0)
        line.end, line.length = end, len(context)
        self._table[line.row, : len(context)] = torch.from_numpy(context)
        return line

    def _new_row(self) -> int:
        if not self._free:
            self.forget(next(iter(self._lines)))
        return self._free.pop()


def read_trees(rows: NDArray[np.int32]) -> list[DraftTree]:
    """[requests, 1 + 3 * K]: see draft_levels.draft"""
    most = (rows.shape[1] - 1) // 3
    counts = rows[:, 0].tolist()
    tokens, parents = rows[:, 1 : 1 + most].tolist(), rows[:, 1 + most : 1 + 2 * most].tolist()
    log_probs = np.ascontiguousarray(rows[:, 1 + 2 * most :]).view(np.float32)
    confidence = np.exp(log_probs, dtype=np.float64).tolist()
    return [
        DraftTree(tokens[i][:count], parents[i][:count], confidence=confidence[i][:count]) if count else EMPTY_TREE
        for i, count in enumerate(counts)
    ]
