"""The inputs of a draft on a device, as draft_inputs.py sends them: which pairs, whose keys, what budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.request import Request
from paceline.ops.random import Purpose, noise_keys
from paceline.spec.feature.draft_inputs import HostFields, RequestInts
from paceline.spec.feature.draft_lines import DraftLines
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

    def write(self, host: HostFields, wanted: Sequence[Wanted], newest: StepRows, queue: FeatureQueue) -> None:
        count = len(wanted)
        spans = np.array([newest.spans[one.request.request_id] for one in wanted], dtype=np.int32)
        begins, ends = spans[:, :1], spans[:, 1:]
        places = ends + self._offsets  # [requests, pairs], the newest last
        is_pair = places >= begins
        places = np.maximum(places, begins)
        host.hidden_rows[:count] = newest.rows[places]
        host.pairs("slots")[:count] = np.where(is_pair, newest.slots[places], -1)
        host.pairs("positions")[:count] = newest.positions[places]
        host.pairs("next_tokens")[:count] = newest.next_tokens[places]
        records = []
        for one, num_pairs in zip(wanted, is_pair.sum(1).tolist(), strict=True):
            line, budget = self._lines.line(one.request, newest, queue), one.budget
            records.append(RequestInts(num_pairs, line.row, line.length, one.width, budget.max_depth, budget.num_nodes))
        host.requests()[:count] = records
        host.floats("lowest")[:count] = [max(LOWEST / 2, one.lowest) for one in wanted]
        host.floats("followed")[:count] = [one.followed for one in wanted]
        noisy = [not self._scores.is_plain(one.request) for one in wanted]
        if any(noisy):
            self._write_noise(host, [one.request for one in wanted], noisy)

    def _write_noise(self, host: HostFields, requests: Sequence[Request], noisy: Sequence[bool]) -> None:
        count = len(requests)
        heats = [request.sampling_params.temperature for request in requests]
        host.floats("scales")[:count] = np.where(noisy, 1.0 / np.maximum(heats, 1e-9), 0.0)
        seeds = np.array([request.seed & ((1 << 64) - 1) for request in requests], dtype=np.uint64)
        ends = np.array([request.num_tokens for request in requests], dtype=np.uint64)
        at = np.add.outer(ends, np.arange(self._num_levels, dtype=np.uint64), dtype=np.uint64)
        keys = noise_keys(seeds[:, None], at, Purpose.SAMPLE)
        host.noise_keys()[:count, : 2 * self._num_levels] = keys.astype("<u8").view("<i4")
