"""What a step of n rows costs, learned while the engine runs.

The curve is kept at a few row counts (knots) with straight lines between them. Every step that only decodes is one
observation: the curve's level follows quickly (other load on the machine, a growing context), its shape slowly. What
decides about speculation is the shape: how much more a pass of 9 rows takes than a pass of 1.

Before the first step the shape comes from a short calibration of the model itself, where one is at hand.
"""

import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.forward import ForwardBatch
from paceline.spec.services import Services

KNOTS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
GUESS_PER_ROW = 0.06  # without a calibration: each further row costs this much of the first
LEVEL_RATE, SHAPE_RATE = 0.2, 0.03
OUTLIER = 0.3  # one step moves the curve at most as if it were off by this much (in log seconds)
CALIBRATION_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CALIBRATION_S = 1.0


class PassCostModel:
    def __init__(self, prior: Mapping[int, float] | None = None) -> None:
        """`prior`: rows -> seconds, any scale."""
        if not prior:
            prior = {1: 1.0, 1025: 1.0 + GUESS_PER_ROW * 1024}
        rows, seconds = np.array(sorted(prior.items()), dtype=np.float64).T
        slope = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.0
        at_knots = np.interp(KNOTS, rows, seconds) + np.maximum(slope, 0.0) * np.maximum(KNOTS - rows[-1], 0.0)
        self._log_shape: NDArray[np.float64] = np.log(at_knots)
        self._level = 0.0
        self._curve = at_knots  # exp(level + shape), never falling
        self.num_observed = 0

    def seconds(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        interpolated: NDArray[np.float64] = np.interp(rows, KNOTS, self._curve)
        return interpolated

    def at(self, rows: int) -> float:
        return float(np.interp(rows, KNOTS, self._curve))

    def observe(self, rows: int, seconds: float) -> None:
        self.num_observed += 1
        error = float(np.log(seconds / self.at(rows)))
        if self.num_observed == 1:
            self._level += error  # the prior's scale says nothing
        else:
            error = min(OUTLIER, max(-OUTLIER, error))
            self._level += LEVEL_RATE * error
            self._bend(rows, SHAPE_RATE * error)
        self._curve = np.maximum.accumulate(np.exp(self._level + self._log_shape))

    def _bend(self, rows: int, amount: float) -> None:
        right = min(int(np.searchsorted(KNOTS, rows)), len(KNOTS) - 1)
        left = max(0, right - 1)
        gap = KNOTS[right] - KNOTS[left]
        share = min(1.0, (rows - KNOTS[left]) / gap) if gap else 1.0
        self._log_shape[left] += (1.0 - share) * amount
        self._log_shape[right] += share * amount

    def table(self, rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> dict[int, float]:
        return {count: self.at(count) for count in rows}


def calibrate(services: Services) -> dict[int, float]:
    """Rows -> seconds of a bare pass, measured on the model before anything runs; empty where there is no model.

    Each row is a request of its own with one token. The slots it writes are free: whoever gets them overwrites them."""
    decoder, kv_cache = services.decoder, services.kv_cache
    if decoder is None or kv_cache is None:
        return {}
    measured: dict[int, float] = {}
    begin_s = time.perf_counter()
    for rows in CALIBRATION_ROWS:
        if rows * services.block_size > services.num_slots or time.perf_counter() - begin_s > CALIBRATION_S:
            break
        batch = _one_token_each(rows, services)
        times = []
        for _ in range(3):
            pass_begin_s = time.perf_counter()
            float(decoder.forward(batch, kv_cache).logits[0, 0])  # reading a value waits for the device
            times.append(time.perf_counter() - pass_begin_s)
        measured[rows] = min(times)
    return measured


def _one_token_each(rows: int, services: Services) -> ForwardBatch:
    def ints(values: range | list[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=services.device)

    block_size = services.block_size
    return ForwardBatch(
        token_ids=ints([i % services.vocab_size for i in range(rows)]),
        positions=ints([0] * rows),
        slot_mapping=ints(range(0, rows * block_size, block_size)),
        context_lens=ints([1] * rows),
        parents=ints([-1] * rows),
        is_node=torch.zeros(rows, dtype=torch.bool, device=services.device),
        req_ids=ints(range(rows)),
        block_tables=ints(range(rows))[:, None],
        cu_query=ints(range(rows + 1)),
        logits_rows=ints(range(rows)),
        block_size=block_size,
    )
