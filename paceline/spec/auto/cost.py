"""What a pass of n rows takes on this model and machine, measured before the first request runs."""

import statistics
import time
from dataclasses import replace

import numpy as np

from paceline.core.forward import Decoder, ForwardBatch, TokenDraws
from paceline.core.packing import RequestRows, pack
from paceline.spec.engine_parts import EngineParts

CALIBRATION_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # each beside one row
CALIBRATION_CONTEXT = 128  # tokens before each row: a row reads its context, a draft's as well as a request's
CALIBRATION_ROUNDS, CALIBRATION_S = 4, 1.0  # as many rounds as fit into the time, one at least


def calibrate(services: EngineParts, rounds: list[list[list[float]]] | None = None) -> dict[int, float]:
    """Rows -> seconds of a bare pass, measured on the model before anything runs; empty where there is no model.

    Each row is a request of its own, after a text that all share. The slots written are free: a request that gets them
    overwrites them. What counts is how many times one row's pass a larger one takes, so each is measured right after
    one of one row: a machine that is slow for a second is slow for both.

    `rounds`: of earlier starts, each of [rows, how many times one row's pass]. One at least is measured here, and takes
    the place of the oldest."""
    decoder, kv_cache = services.decoder, services.kv_cache
    if decoder is None or kv_cache is None:
        return {}
    begin_s = time.perf_counter()
    block_size, num_blocks = services.block_size, services.num_slots // services.block_size
    shared = list(range(min(CALIBRATION_CONTEXT, services.max_model_len - 1) // block_size))[: num_blocks // 2]
    sizes = [rows for rows in (1, *CALIBRATION_ROWS) if len(shared) + rows <= num_blocks]
    num_shared = len(shared) * block_size
    tokens = [i % services.vocab_size for i in range(max(num_shared, *CALIBRATION_ROWS))]
    single = [RequestRows([*shared, len(shared) + i], [tokens[i]], num_shared) for i in range(max(CALIBRATION_ROWS))]
    batches = {rows: _as_decoded(pack(single[:rows], block_size), decoder) for rows in sizes}
    if shared:  # the first pass of all, which prepares things as well
        decoder.forward(pack([RequestRows(shared, tokens[:num_shared], 0)], block_size), kv_cache)

    def seconds(rows: int) -> float:
        pass_begin_s = time.perf_counter()
        output = decoder.forward(batches[rows], kv_cache)
        if output.tokens is None:
            float(output.logits[0, 0])  # reading a value waits for the device, as reading the tokens did
        return time.perf_counter() - pass_begin_s

    one_row_s: list[float] = []
    rounds = [] if rounds is None else rounds
    del rounds[: 1 - CALIBRATION_ROUNDS]
    for number in range(CALIBRATION_ROUNDS - len(rounds)):
        if number and (time.perf_counter() - begin_s) * (number + 1) / number > CALIBRATION_S:
            break
        rounds.append([])
        for rows in sizes:
            one_row_s.append(seconds(1))
            rounds[-1].append([rows, seconds(rows) / one_row_s[-1] if rows > 1 else 1.0])
    unit_s = statistics.median(one_row_s) if one_row_s else 0.0
    ratios = {rows: [ratio for one in rounds for count, ratio in one if count == rows] for rows in sizes}
    return {rows: unit_s * statistics.median_low(found) for rows, found in ratios.items()}


def _as_decoded(batch: ForwardBatch, decoder: Decoder) -> ForwardBatch:
    """The pass as decoding runs it: a model that draws tokens writes no logits."""
    if not decoder.draws_tokens:
        return batch
    count = batch.logits_rows.shape[0]
    zeros = TokenDraws(np.zeros(count, np.float32), np.zeros(count, np.int64), np.zeros(count, np.int32))
    return replace(batch, draws=zeros, wants_logits=False)
