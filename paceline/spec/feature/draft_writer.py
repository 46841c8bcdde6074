"""The inputs of a draft on a device, as draft_inputs.py sends them: which pairs, whose keys, what budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.request import Request
from paceline.ops.random import Purpose, noise_keys
from paceline.spec.feature.draft_inputs import HostFields, RequestInts
from paceline.spec.feature.draft_lines import DraftLines, Line
from paceline.spec.feature.draft_scores import LOWEST, DraftScores
from paceline.spec.feature.feature_queue import FeatureQueue, StepRows
from paceline.spec.proposer import Budget


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to draft for."""

    request: Request
    budget: Budget
    width: int
    lowest: float  # log-probability from which a path is kept
    followed: float  # and from which it is extended


class DraftWriter:
    def __init__(self, lines: DraftLines, scores: DraftScores, num_pairs: int, num_levels: int) -> None:
        self._lines, self._scores, self._num_levels = lines, scores, num_levels
        self._offsets = np.arange(-num_pairs, 0, dtype=np.int32)  # from the end of a request's rows
        # What the logits of a request are multiplied by before noise is added; 0: no noise. Only requests that suit:
        # once one does it always will, because `min_tokens` is all that wears off.
        self._scales: dict[str, float] = {}

    def suit(self, request: Request) -> bool:
        """Nothing but noise, if anything, reorders this request's tokens."""
        if request.request_id in self._scales:
            return True
        is_plain = self._scores.is_plain(request)
        if is_plain or self._scores.is_noise_only(request):
            self._scales[request.request_id] = 0.0 if is_plain else 1.0 / request.sampling_params.temperature
            return True
        return False

    def forget(self, name: str) -> None:
        self._scales.pop(name, None)
        self._lines.forget(name)

    def write(self, host: HostFields, wanted: Sequence[Wanted], newest: StepRows, queue: FeatureQueue) -> None:
        """All of them suit."""
        count = len(wanted)
        spans = [newest.spans[one.request.request_id] for one in wanted]
        ints = np.array(spans, dtype=np.int32)
        begins, ends = ints[:, :1], ints[:, 1:]
        places = ends + self._offsets  # [requests, pairs], the newest last
        is_pair = places >= begins
        places = np.maximum(places, begins)
        host.hidden_rows[:count] = newest.rows[places]
        host.pairs("slots")[:count] = np.where(is_pair, newest.slots[places], -1)
        host.pairs("positions")[:count] = newest.positions[places]
        host.pairs("next_tokens")[:count] = newest.next_tokens[places]
        most, firsts = len(self._offsets), newest.positions[ints[:, 0]].tolist()
        records = []
        for one, (begin, end), first in zip(wanted, spans, firsts, strict=True):
            line = self._lines.line(one.request, first, end - begin, queue)
            records.append(_record(min(end - begin, most), line, one))
        self._write_limits(host, wanted, records)
        if any(self._scales[one.request.request_id] for one in wanted):
            self._write_noise_keys(host, [one.request for one in wanted])

    def write_ahead(self, host: HostFields, wanted: Sequence[Wanted]) -> bool:
        """For drafts whose newest pairs are found on the device (eagle_rounds.py): all but those. False where the
        pairs before them are not all there."""
        lines = [self._lines.known(one.request) for one in wanted]
        if not all(lines):
            return False
        records = [_record(0, line, one) for line, one in zip(lines, wanted, strict=True) if line is not None]
        if wanted:
            self._write_limits(host, wanted, records)
        return True

    def follow(self, request: Request, begin: int, end: int) -> None:
        self._lines.follow(request, begin, end)

    def _write_limits(self, host: HostFields, wanted: Sequence[Wanted], records: Sequence[RequestInts]) -> None:
        count = len(wanted)
        host.requests()[:count] = records
        host.floats("lowest")[:count] = np.maximum(LOWEST / 2, [one.lowest for one in wanted])
        host.floats("followed")[:count] = [one.followed for one in wanted]
        host.floats("scales")[:count] = [self._scales[one.request.request_id] for one in wanted]

    def _write_noise_keys(self, host: HostFields, requests: Sequence[Request]) -> None:
        seeds = np.array([request.seed & ((1 << 64) - 1) for request in requests], dtype=np.uint64)
        ends = np.array([request.num_tokens for request in requests], dtype=np.uint64)
        at = np.add.outer(ends, np.arange(self._num_levels, dtype=np.uint64), dtype=np.uint64)
        keys = noise_keys(seeds[:, None], at, Purpose.SAMPLE)
        host.noise_keys()[: len(requests), : 2 * self._num_levels] = keys.astype("<u8").view("<i4")


def _record(num_pairs: int, line: Line, one: Wanted) -> RequestInts:
    return RequestInts(num_pairs, line.row, line.length, one.width, one.budget.max_depth, one.budget.num_nodes)
