"""The target's hidden states on their way into a drafter's KV.

Every pass of the target yields features of the tokens that are now committed, whether they are drafted for or not. They
are queued with the slots that their tokens have at that moment (also of a request that has just ended: others may find
its blocks in the prefix cache), and a drafter takes them all, in order, before it drafts or when there are many. So
nothing is kept per request: a slot that was given to another request meanwhile is written again by the rows of its new
owner, which stand later in the queue; and a prefix that another request finds in the cache brings the drafter's keys
along, in the same slots.

While a drafter is skipped it is told of no pass, and the target does not keep its hidden states. What it took in before
stays valid until its block is handed out again. Above all this is the beginning of a prompt that many requests share:
without it far fewer drafts are accepted. So for every slot the use of its block is noted in which its feature was taken
in, and a context is the part of a request's tokens whose features were taken in during the present use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import Request
from paceline.models.drafters.paged import on_device
from paceline.spec.engine_parts import EngineParts
from paceline.spec.proposer import RequestPass, StepContext

IntArray = NDArray[np.int32]

FLUSH_ROWS = 64  # features that wait, at most, while nothing is drafted


@dataclass(frozen=True, slots=True)
class FeatureRows:
    features: Tensor  # [rows, layers, hidden]
    positions: IntArray  # [rows]
    slots: IntArray  # [rows]
    next_tokens: IntArray  # [rows]: the token after each row's, known by now
    last_rows: dict[str, int]  # request id -> its newest row

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, rows: slice) -> "FeatureRows":
        if rows.start == 0 and rows.stop >= len(self):
            return self
        at, slots, following = self.positions[rows], self.slots[rows], self.next_tokens[rows]
        return FeatureRows(self.features[rows], at, slots, following, self.last_rows)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The committed rows of one pass. Its hidden states stay where they are until somebody asks for features."""

    hidden: Tensor  # [rows of the pass, layers, hidden], the wanted layers only
    rows: IntArray  # [rows]: of `hidden`
    positions: IntArray  # [rows]
    slots: IntArray  # [rows]
    next_tokens: IntArray  # [rows]
    uses: IntArray  # [rows]: how many times the row's block had been handed out
    spans: dict[str, tuple[int, int]]  # request id -> its first row here and the one after its last

    def __len__(self) -> int:
        return len(self.rows)

    def last_position(self, name: str) -> int:
        """Of a request's newest row; -1 where it has none."""
        span = self.spans.get(name)
        return -1 if span is None else int(self.positions[span[1] - 1])

    def features(self) -> Tensor:
        count, places = len(self), self.rows.tolist()
        if not count or places == list(range(places[0], places[0] + count)):
            first = places[0] if count else 0
            return self.hidden if count == len(self.hidden) else self.hidden[first : first + count]
        return take_rows(self.hidden, self.rows)

    def without(self, names: Sequence[str], most: int) -> "StepRows":
        """All rows but the newest ones, at most so many each, of these requests."""
        kept = np.ones(len(self), dtype=np.bool_)
        for name in names:
            begin, end = self.spans[name]
            kept[max(begin, end - most) : end] = False
        places = np.flatnonzero(kept)
        gone = set(names)
        ends = np.cumsum(kept).tolist()  # place of each row among those kept, plus one
        spans = {
            name: (ends[begin] - 1, ends[end - 1]) for name, (begin, end) in self.spans.items() if name not in gone
        }
        return StepRows(
            self.hidden,
            self.rows[places],
            self.positions[places],
            self.slots[places],
            self.next_tokens[places],
            self.uses[places],
            spans,
        )


class FeatureQueue:
    def __init__(self, hidden_layers: Sequence[int], services: EngineParts) -> None:
        self._layers, self._services = tuple(hidden_layers), services
        self._parts: list[StepRows] = []
        self._heard = np.zeros(services.num_slots, dtype=np.int32)  # [slots]: in which use of its block; 0: never
        self._block_uses: IntArray | None = None  # [blocks]: times that each was handed out, up to date

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, step: StepContext) -> StepRows:
        """Queue a step's features. The step must have hidden states."""
        assert step.hidden is not None and step.block_uses is not None, "hidden states come with whose blocks are whose"
        self._block_uses = step.block_uses
        columns = [step.hidden_layers.index(layer) for layer in self._layers]
        is_all = columns == list(range(step.hidden.shape[1]))
        hidden = step.hidden if is_all else step.hidden[:, columns]
        part = self._rows(step.passes, hidden)
        self._parts.append(part)
        return part

    def note(self, seen: RequestPass, begin: int, end: int, step: StepContext) -> None:
        """The device has taken in the pairs at positions [begin, end) of a request by itself."""
        assert step.block_uses is not None
        self._block_uses = step.block_uses
        if begin < end and seen.block_ids:
            slots = block_slots(seen.block_ids, end, self._services.block_size)[begin:]
            self._heard[slots] = self._uses(slots)

    def follow(self, step: StepContext, flush: Callable[[], None]) -> bool:
        """Queue a step's features and have them taken in where they must not wait; False where there are none.

        The blocks of a request that has ended may belong to another in this very step: one slot, one row in a call."""
        if step.hidden is None:
            self._parts.clear()
            return False
        if step.gone:
            flush()
        self.add(step)
        if step.gone or len(self) > FLUSH_ROWS:
            flush()
        return True

    def follow_lazily(self, step: StepContext, flush: Callable[[], None]) -> StepRows | None:
        """As `follow`, for a drafter that takes in the newest step by itself when it drafts: those rows wait."""
        if step.hidden is None:
            self._parts.clear()
            return None
        if step.gone or len(self) > FLUSH_ROWS:
            flush()
        return self.add(step)

    def context(self, request: Request) -> IntArray:
        """The slots of a request's tokens that have keys, in order; the last token has none yet."""
        slots = block_slots(request.block_ids, request.num_tokens - 1, self._services.block_size)
        has_keys = self._heard[slots] == self._uses(slots)
        return slots if has_keys.all() else slots[has_keys]

    def take(self) -> FeatureRows | None:
        """Everything queued, oldest first."""
        parts, self._parts = [part for part in self._parts if len(part)], []
        if not parts:
            return None
        last_rows: dict[str, int] = {}
        begin = 0
        for part in parts:
            last_rows |= {name: begin + end - 1 for name, (_, end) in part.spans.items()}
            begin += len(part)
            self.mark(part)
        features = [part.features() for part in parts]
        return FeatureRows(
            features[0] if len(parts) == 1 else torch.cat(features),
            _joined([part.positions for part in parts]),
            _joined([part.slots for part in parts]),
            _joined([part.next_tokens for part in parts]),
            last_rows,
        )

    def leave_out(self, newest: StepRows, names: Sequence[str], most: int) -> None:
        """Whoever drafts takes in the newest rows of these requests itself: they leave the queue."""
        if self._parts and self._parts[-1] is newest:
            spans = newest.spans
            if len(names) == len(spans) and all(end - begin <= most for begin, end in spans.values()):
                self._parts.pop()  # nothing is left
            else:
                self._parts[-1] = newest.without(names, most)
            self.mark(newest)

    def mark(self, part: StepRows) -> None:
        self._heard[part.slots] = part.uses

    def known(self, slots: slice, use: int) -> NDArray[np.bool_]:
        """Which slots of a block have features of this use of it."""
        known: NDArray[np.bool_] = self._heard[slots] == use
        return known

    def mark_known(self, slots: slice, use: int, known: NDArray[np.bool_]) -> None:
        """The keys of a block came from elsewhere."""
        self._heard[slots] = np.where(known, use, 0)

    def _uses(self, slots: IntArray) -> IntArray:
        assert self._block_uses is not None
        uses: IntArray = self._block_uses[slots // np.int32(self._services.block_size)]
        return uses

    def _rows(self, passes: Sequence[RequestPass], hidden: Tensor) -> StepRows:
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        next_tokens: list[int] = []
        spans: dict[str, tuple[int, int]] = {}
        for verified in passes:
            request, first, begin = verified.request, verified.rows.start, verified.start
            if not verified.block_ids or request.error is not None:
                continue
            own = list(range(first, first + verified.num_committed))
            own += [first + verified.num_committed + node for node in verified.accepted]
            # A request may have ended inside the accepted path; after its last token there is no next one.
            own = own[: request.num_tokens - 1 - begin]
            if not own:
                continue
            end = begin + len(own)
            spans[request.request_id] = (len(rows), len(rows) + len(own))
            rows += own
            positions += range(begin, end)
            next_tokens += request.token_ids[begin + 1 : end + 1]
            slots += _slots_between(verified.block_ids, begin, end, self._services.block_size)
        taken, at, where, following = np.array([rows, positions, slots, next_tokens], dtype=np.int32)
        return StepRows(hidden, taken, at, where, following, self._uses(where), spans)


def _joined(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _slots_between(block_ids: Sequence[int], begin: int, end: int, block_size: int) -> list[int]:
    if end - begin > block_size:
        slots: list[int] = block_slots(block_ids, end, block_size)[begin:].tolist()
        return slots
    return [block_ids[at // block_size] * block_size + at % block_size for at in range(begin, end)]


def take_rows(x: Tensor, rows: Sequence[int] | IntArray) -> Tensor:
    """x[rows], copied. On a CPU by numpy: PyTorch would start its threads for a few kilobytes."""
    places = np.asarray(rows, dtype=np.int32)
    if x.device.type == "cpu" and x.dtype != torch.bfloat16:
        return torch.from_numpy(x.numpy()[places])
    return x.index_select(0, on_device(places, x.device))


def block_slots(block_ids: Sequence[int], num_tokens: int, block_size: int) -> IntArray:
    """The slots of the first tokens in these blocks: [num_tokens]"""
    blocks = np.asarray(block_ids[: -(-num_tokens // block_size)], dtype=np.int32)
    slots = np.add.outer(blocks * np.int32(block_size), np.arange(block_size, dtype=np.int32), dtype=np.int32)
    return np.asarray(slots, dtype=np.int32).reshape(-1)[:num_tokens]
