"""What things cost on this model and machine, measured: a pass of n rows before the first request runs, a drafter's call
whenever it is made, and the present price of a second in tokens.

A drafter's price is never inferred from what it reads or is built of: the same method may be nearly free in one engine
and take half of a step in another.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.core.forward import Decoder, ForwardBatch, TokenDraws
from paceline.core.packing import RequestRows, pack
from paceline.spec.engine_parts import EngineParts

CALIBRATION_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # each beside one row; where passes are padded, their sizes
MOST_CALIBRATED = 512
CALIBRATION_CONTEXT = 128  # tokens before each row: a row reads its context, a draft's as well as a request's
CALIBRATION_ROUNDS, CALIBRATION_S = 4, 1.0  # as many rounds as fit into the time, one at least
CALL_MEMORY = 0.98  # decay of a call's weight with each later one: half of it after 35
PRICE_STEPS = 16.0  # over which tokens per second are averaged


def calibrate(services: EngineParts) -> dict[int, float]:
    """Rows -> seconds of a bare pass, measured on the model before anything runs; empty where there is no model.

    Each row is a request of its own, after a text that all of them share. The slots written are free: a
    request that gets them overwrites them."""
    decoder, kv_cache = services.decoder, services.kv_cache
    if services.pass_cost is not None or decoder is None or kv_cache is None:
        return dict(services.pass_cost or {})
    begin_s = time.perf_counter()
    block_size, num_blocks = services.block_size, services.num_slots // services.block_size
    shared = list(range(min(CALIBRATION_CONTEXT, services.max_model_len - 1) // block_size))[: num_blocks // 2]
    wanted = [rows for rows in services.pass_sizes if rows <= MOST_CALIBRATED] or CALIBRATION_ROWS
    sizes = [rows for rows in sorted({1, *wanted}) if len(shared) + rows <= num_blocks]
    num_shared = len(shared) * block_size
    tokens = [i % services.vocab_size for i in range(max(num_shared, *sizes))]
    single = [RequestRows([*shared, len(shared) + i], [tokens[i]], num_shared) for i in range(max(sizes))]
    batches = {rows: _as_decoded(pack(single[:rows], block_size), decoder) for rows in sizes}
    if shared:  # the first pass of all, which prepares things as well
        text = RequestRows(shared, tokens[:num_shared], 0)
        decoder.forward(pack([text], block_size), kv_cache)

    def seconds(rows: int) -> float:
        pass_begin_s = time.perf_counter()
        output = decoder.forward(batches[rows], kv_cache)
        if output.tokens is None:
            float(output.logits[0, 0])  # reading a value waits for the device, as reading the tokens did
        return time.perf_counter() - pass_begin_s

    # What counts is how many times one row's pass a larger one takes. So each is measured right after one of one row:
    # a machine that is slow for a second is slow for both.
    one_row_s: list[float] = []
    ratios: dict[int, list[float]] = {rows: [] for rows in sizes}
    for number in range(CALIBRATION_ROUNDS):
        for rows in sizes:
            if number and time.perf_counter() - begin_s > CALIBRATION_S:
                break
            one_row_s.append(seconds(1))
            ratios[rows].append(seconds(rows) / one_row_s[-1] if rows > 1 else 1.0)
    unit_s = statistics.median(one_row_s) if one_row_s else 0.0
    return {rows: unit_s * statistics.median_low(found) for rows, found in ratios.items()}


def _as_decoded(batch: ForwardBatch, decoder: Decoder) -> ForwardBatch:
    """The pass as decoding runs it: a model that draws tokens writes no logits."""
    if not decoder.draws_tokens:
        return batch
    count = batch.logits_rows.shape[0]
    zeros = TokenDraws(np.zeros(count, np.float32), np.zeros(count, np.int64), np.zeros(count, np.int32))
    return replace(batch, draws=zeros, wants_logits=False)


class DrafterCost:
    """Seconds that asking a drafter takes, telling it of the pass included: call + each x requests, and how much of that
    a level takes. Straight lines through the calls made, of which old ones count less.

    In units of a pass of one row. Before the first call it is thought to take a fifth of that for one request, and a
    whole one for eight, on any machine."""

    def __init__(self) -> None:
        # Sums over calls, each weighing less with every later one: 1, n, n*n, seconds, n*seconds
        self.calls = [0.2, 0.9, 6.5, 0.12, 0.82]
        self.levels = [0.2, 0.6, 2.0, 0.12, 0.42]  # likewise, with levels instead of requests
        self.num_learned = 0

    def learn(self, seconds: float, num_requests: int, num_levels: int, unit_s: float) -> None:
        passes = seconds / unit_s
        call, each = self._line(self.calls)
        expected = call + each * num_requests
        if self.num_learned > 2:  # one stall must not look like a price; what is really so expensive shows it again
            passes = min(passes, 0.05 + 2.0 * expected)
        elif not self.num_learned:  # only the proportions of what was believed before are kept
            for sums in (self.calls, self.levels):
                sums[3:] = [one * passes / expected for one in sums[3:]]
        for sums, count in ((self.calls, num_requests), (self.levels, num_levels)):
            new = (1.0, count, count * count, passes, count * passes)
            sums[:] = [CALL_MEMORY * old + one for old, one in zip(sums, new, strict=True)]
        self.num_learned += 1

    def parts(self, unit_s: float) -> tuple[float, float]:
        """Seconds of a call, and of each request in it."""
        call, each = self._line(self.calls)
        return call * unit_s, each * unit_s

    def least_s(self, num_requests: int, unit_s: float) -> float:
        """What asking for so many may take at least: before anything was measured, nearly nothing."""
        call_s, each_s = self.parts(unit_s)
        return (call_s + each_s * num_requests) * (1.0 if self.num_learned else 0.1)

    def level_s(self, num_requests: int, unit_s: float) -> float:
        """What one more level takes, for each of so many requests."""
        return self._line(self.levels)[1] * unit_s / max(1, num_requests)

    @staticmethod
    def _line(sums: Sequence[float]) -> tuple[float, float]:
        """The best line with neither part below zero."""
        weight, n, nn, s, ns = sums
        spread = weight * nn - n * n
        slope = (weight * ns - n * s) / spread if spread > 1e-9 * nn * weight else ns / nn
        start = (s - slope * n) / weight
        if start < 0.0:
            return 0.0, ns / nn
        return (start, slope) if slope > 0.0 else (s / weight, 0.0)


class Price:
    """The batch's present tokens per second: what a second is worth. It follows the last steps, and is never less than
    what plain decoding gives, so that nothing is bought that plain decoding would beat."""

    def __init__(self) -> None:
        self._tokens = self._passes = 1.0  # per request and step; and the step's time in plain passes

    def learn(self, tokens_per_request: float, seconds_in_passes: float, num_steps: int = 1) -> None:
        weight = 1.0 - (1.0 - 1.0 / PRICE_STEPS) ** num_steps
        self._tokens += weight * (tokens_per_request - self._tokens)
        self._passes += weight * (min(seconds_in_passes, 4.0) - self._passes)

    def tokens_per_s(self, num_requests: int, plain_s: float) -> float:
        return num_requests / plain_s * max(1.0, self._tokens / self._passes)
