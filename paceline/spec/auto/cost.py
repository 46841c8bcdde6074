"""What things cost on this model and machine, measured: a pass of n rows before the first request runs, a drafter's call
whenever it is made, and the present price of a second in tokens.

A drafter's price is never inferred from what it reads or is built of: the same method may be nearly free in one engine
and take half of a step in another.
"""

import math
import statistics
import time
from dataclasses import replace

import numpy as np

from paceline.core.forward import Decoder, ForwardBatch, TokenDraws
from paceline.core.packing import RequestRows, pack
from paceline.spec.auto.estimate import Estimate
from paceline.spec.engine_parts import EngineParts

CALIBRATION_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # each beside one row; where passes are padded, their sizes
MOST_CALIBRATED = 512
CALIBRATION_CONTEXT = 128  # tokens before each row: a row reads its context, a draft's as well as a request's
CALIBRATION_ROUNDS, CALIBRATION_S = 4, 1.0  # as many rounds as fit into the time, one at least
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
    """Seconds that asking a drafter takes, telling it of the pass included: (1, levels, requests, requests x levels).

    In units of a pass of one row, so that the first belief fits any machine: a call costs a fifth of a pass, give or
    take as much."""

    def __init__(self) -> None:
        self.estimate = Estimate((0.1, 0.05, 0.02, 0.02), (0.2, 0.1, 0.05, 0.05))
        self.levels = 2.0  # that it drafts, lately

    def learn(self, seconds: float, num_requests: int, num_levels: int, unit_s: float) -> None:
        features = (1.0, float(num_levels), float(num_requests), float(num_requests * num_levels))
        expected = self.estimate.at(features)
        error = seconds / unit_s - expected
        # One stall must not look like a price; one that is really so much more expensive shows it a few times.
        most = max(abs(expected), 0.1 if self.estimate.num_learned > 2 else math.inf)
        noise = (0.3 * expected) ** 2 + 1e-6
        self.estimate.learn(features, max(-most, min(most, error)), noise)
        self.levels += 0.1 * (num_levels - self.levels)

    def parts(self, unit_s: float) -> tuple[float, float]:
        """Seconds of a call, and of each request in it, at the levels that it drafts lately."""
        call, level, request, both = self.estimate.weights
        return max(0.0, call + level * self.levels) * unit_s, max(0.0, request + both * self.levels) * unit_s

    def least_s(self, num_requests: int, unit_s: float) -> float:
        """What asking for so many may take at least: before anything was measured, nearly nothing."""
        features = (1.0, self.levels, float(num_requests), num_requests * self.levels)
        expected, deviation = self.estimate.at(features), math.sqrt(self.estimate.variance(features))
        return max(0.02, expected - deviation) * unit_s if deviation > 0.2 * expected else max(1e-4, expected) * unit_s

    def level_s(self, num_requests: int, unit_s: float) -> float:
        """What one more level takes, for each of so many requests."""
        _, level, _, both = self.estimate.weights
        return max(0.0, level / max(1, num_requests) + both) * unit_s


class Price:
    """The batch's present tokens per second: what a second is worth. It follows the last steps, and is never less than
    what plain decoding gives, so that nothing is bought that plain decoding would beat."""

    def __init__(self) -> None:
        self._tokens = self._passes = 1.0  # per request and step; and the step's time in plain passes

    def learn(self, tokens_per_request: float, seconds_in_passes: float) -> None:
        self._tokens += (tokens_per_request - self._tokens) / PRICE_STEPS
        self._passes += (min(seconds_in_passes, 4.0) - self._passes) / PRICE_STEPS

    def tokens_per_s(self, num_requests: int, plain_s: float) -> float:
        return num_requests / plain_s * max(1.0, self._tokens / self._passes)
