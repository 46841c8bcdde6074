"""Whole EAGLE drafts in one CUDA graph: what native_drafts.py is on a CPU.

A graph takes in the newest pairs of its requests, grows their trees (fused_draft.py) and leaves them in one array. The
host sends one array of ints, launches, and reads one array back: `launch` does not wait, `collect` does. Longer
stretches of pairs, as of prompts, are taken in beforehand, kernel by kernel.

All graphs are captured when the drafter is built. A draft whose size has none is padded to the next larger one.
Without CUDA the same kernels, or their plain twin, run without a graph.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.models.graphs import record
from paceline.spec.buckets import BUCKETS
from paceline.spec.feature.draft_inputs import DraftInputs, DraftViews
from paceline.spec.feature.draft_levels import DraftKernels, DraftRoom, DraftShape
from paceline.spec.feature.draft_lines import DraftLines
from paceline.spec.feature.draft_scores import DraftScores
from paceline.spec.feature.draft_writer import DraftWriter, Wanted
from paceline.spec.feature.feature_queue import FeatureQueue, StepRows
from paceline.spec.tree_answers import Answer, TreeAnswers

logger = logging.getLogger("paceline")

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of a graph, and as many as the drafter may ever have
LINES_EACH = 2  # lines of the table per request of the largest graph
CAPTURE_S = 8.0  # once the largest graph of every bucket is there, no further one is begun after so long


def scratch_slots(max_requests: int, width: int, max_depth: int) -> int:
    """Behind the target's slots: the nodes of a full graph, and one slot that is nobody's."""
    return max_requests * width * max_depth + 1


@dataclass(slots=True)
class DraftClock:
    """Seconds of the host by part, since the start."""

    num_drafts: int = 0
    prepare_s: float = 0.0  # collecting and sending the inputs
    launch_s: float = 0.0
    read_s: float = 0.0  # waiting for the device
    trees_s: float = 0.0
    num_captured: int = 0
    capture_s: float = 0.0


DRAFT_CLOCK = DraftClock()  # of all drafters of the process, for measurements


class PendingDrafts:
    """Drafts that were launched. `collect` waits for them, once."""

    def __init__(self, drafts: "CapturedDrafts", parts: list[tuple[Answer, int]]) -> None:
        self._drafts, self._parts = drafts, parts

    def collect(self) -> list[DraftTree]:
        parts, self._parts = self._parts, []
        return [tree for answer, count in parts for tree in self._drafts.read(answer, count)]


class CapturedDrafts:
    def __init__(
        self,
        kernels: DraftKernels,
        room: DraftRoom,
        scores: DraftScores,
        *,
        max_length: int,  # tokens of a request
        feature_size: int,
        feature_dtype: torch.dtype,
    ) -> None:
        self._kernels, self.room = kernels, room
        self._device = room.kv.device
        self.num_pairs = room.num_pairs
        self._lines = DraftLines(
            LINES_EACH * room.max_requests, max_length + room.num_pairs, room.num_pairs, self._device
        )
        self._writer = DraftWriter(self._lines, scores, room.num_pairs, room.num_levels)
        self._id_constants = torch.from_numpy(scores.id_constants.view(np.int32).copy()).to(self._device)
        self._inputs = DraftInputs(room.max_requests, room.num_pairs, room.num_levels, self._device)
        num_rows = room.max_requests * room.num_pairs
        self._hidden = torch.zeros(num_rows, feature_size, dtype=feature_dtype, device=self._device)
        self._graphs: dict[DraftShape, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[DraftShape, Tensor] = {}
        self._shapes = draft_shapes(room)
        self._fitting: dict[tuple[int, int, int], DraftShape] = {}
        self._answers = TreeAnswers(room.max_requests, room.num_nodes, self._device)
        if self._device.type == "cuda":
            self._capture_all()

    def suit(self, request: Request) -> bool:
        """Can it be drafted for here?"""
        return self._writer.suit(request)

    def forget(self, name: str) -> None:
        self._writer.forget(name)

    def launch(self, wanted: Sequence[Wanted], newest: StepRows, queue: FeatureQueue) -> PendingDrafts:
        """The newest rows of all these requests were left out of the queue and marked."""
        most = self.room.max_requests
        groups = [wanted[begin : begin + most] for begin in range(0, len(wanted), most)]
        return PendingDrafts(self, [(self._launch(group, newest, queue), len(group)) for group in groups])

    def _launch(self, wanted: Sequence[Wanted], newest: StepRows, queue: FeatureQueue) -> Answer:
        begin_s = time.perf_counter()
        deepest = max(one.budget.max_depth for one in wanted)
        shape = self.fit(len(wanted), max(one.width for one in wanted), deepest)
        count, inputs = shape.num_requests, self._inputs
        self._writer.write(inputs.host(count), wanted, newest, queue)
        inputs.send(count)
        rows = inputs.hidden_rows(count)
        torch.index_select(newest.hidden.flatten(1), 0, rows, out=self._hidden[: len(rows)])
        sent_s = time.perf_counter()
        answer = self._answers.send_back(self._run(shape)[: len(wanted)])
        DRAFT_CLOCK.num_drafts += 1
        DRAFT_CLOCK.prepare_s += sent_s - begin_s
        DRAFT_CLOCK.launch_s += time.perf_counter() - sent_s
        return answer

    # For drafts whose newest pairs are found on the device (eagle_rounds.py):

    def write_ahead(self, shape: DraftShape, wanted: Sequence[Wanted]) -> bool:
        """Send all that such drafts need beside the pairs; False where earlier pairs of a request are missing."""
        if not self._writer.write_ahead(self._inputs.host(shape.num_requests), wanted):
            return False
        self._inputs.send(shape.num_requests)
        return True

    def follow(self, request: Request, begin: int, end: int) -> None:
        """The device has taken in its pairs at positions [begin, end)."""
        self._writer.follow(request, begin, end)

    def hidden_rows(self, shape: DraftShape) -> Tensor:
        """[R * F] int32: which rows of the pass the newest pairs are made of."""
        return self._inputs.hidden_rows(shape.num_requests)

    def views(self, shape: DraftShape) -> DraftViews:
        hidden = self._hidden[: shape.num_requests * self.num_pairs]
        return self._inputs.views(shape.num_requests, hidden, self._lines.table, self._id_constants)

    def run_after(self, hidden: Tensor, shape: DraftShape) -> Tensor:
        """A draft from the hidden states of a pass, [rows, layers, hidden], kernel by kernel: [R, 1 + 3 * K] int32"""
        rows = self.hidden_rows(shape)
        torch.index_select(hidden.flatten(1), 0, rows, out=self._hidden[: len(rows)])
        return self._run_kernels(shape)

    def read(self, answer: Answer, count: int) -> list[DraftTree]:
        """Waits for the device."""
        begin_s = time.perf_counter()
        answer.wait()
        read_s = time.perf_counter()
        trees = self._answers.read(answer, count)
        DRAFT_CLOCK.read_s += read_s - begin_s
        DRAFT_CLOCK.trees_s += time.perf_counter() - read_s
        return trees

    def _run(self, shape: DraftShape) -> Tensor:
        graph = self._graphs.get(shape)
        if graph is None:
            return self._run_kernels(shape)
        graph.replay()
        return self._outputs[shape]

    def _run_kernels(self, shape: DraftShape) -> Tensor:
        return self._kernels.run(self.views(shape), shape)

    def fit(self, num_requests: int, width: int, num_levels: int) -> DraftShape:
        """The size that such a draft is padded to."""
        wanted = (num_requests, width, num_levels)
        found = self._fitting.get(wanted)
        if found is None:
            found = self._fitting[wanted] = next(shape for shape in self._shapes if shape.fits(*wanted))
        return found

    def _capture_all(self) -> None:
        """The deepest and widest first: every other draft can be padded to one of those."""
        begin_s = time.perf_counter()
        deepest, widest = self.room.num_levels, self.room.width
        order = sorted(self._shapes, key=lambda shape: (shape.num_levels < deepest) + (shape.width < widest))
        for i, shape in enumerate(order):
            is_needed = (shape.num_levels, shape.width) == (deepest, widest)
            if not is_needed and time.perf_counter() - begin_s > CAPTURE_S:
                break
            self._capture(shape)
            if (i + 1) % 20 == 0:
                logger.info("captured %d of %d sizes of draft", i + 1, len(order))
        self._shapes = [shape for shape in self._shapes if shape in self._graphs]
        took_s = time.perf_counter() - begin_s
        logger.info("%d of %d sizes of draft are ready, after %.1f s", len(self._shapes), len(order), took_s)
        DRAFT_CLOCK.num_captured += len(self._shapes)
        DRAFT_CLOCK.capture_s += took_s

    @torch.no_grad()
    def _capture(self, shape: DraftShape) -> None:
        """Run once over padding, so that every kernel is compiled, then record."""
        self._inputs.host(shape.num_requests)
        self._inputs.send(shape.num_requests)

        def launch() -> None:
            self._outputs[shape] = self._run_kernels(shape)

        self._graphs[shape] = record(launch)


def draft_shapes(room: DraftRoom) -> list[DraftShape]:
    """Every size that a draft may have, cheapest first."""
    levels = sorted({min(count, room.num_levels) for count in LEVELS})
    shapes = [
        DraftShape(num_requests, width, num_levels)
        for num_requests in (size for size in BUCKETS if size <= room.max_requests)
        for width in sorted({1, room.width})
        for num_levels in levels
    ]
    return sorted(shapes, key=lambda shape: (shape.num_requests, shape.num_levels, shape.width))
