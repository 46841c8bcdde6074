"""What a step of n rows for b requests costs, learned while the engine runs.

    seconds = level x shape(rows) + request_s x requests

The shape is kept at a few row counts (knots) with straight lines between them. Before the first step it comes from a
short calibration of the model itself, where one is at hand. Every step that only decodes is one observation: level and
request_s follow quickly (a Kalman filter of two numbers), the shape slowly.

What decides about speculation is what one more row costs, and that is why the requests have a term of their own: they
bring contexts to read and answers to take in, however many rows they have. Steps without drafts cannot tell the two
apart. Then most of what the calibration did not foresee is laid to the requests, and the first drafts show the truth:
an error to that side is found out, while rows that are thought too dear are never tried.
"""

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Mapping

from paceline.core.packing import RequestRows, pack
from paceline.spec.engine_parts import Services

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GUESS_PER_ROW = 0.06  # without a calibration: each further row costs this much of the first
# How quickly the shape follows; and what passes with drafts show, the first ones of about so many rows and later ones.
SHAPE_RATE, FIRST_DRAFTED_RATE, DRAFTED_RATE = 0.03, 0.25, 0.1
# Standard deviations: of the level (relative) and of request_s (in passes of one row), at first, gained from one
# observation to the next, and at most; and of an observation (relative).
FIRST_DOUBT, GAINED_DOUBT, MOST_DOUBT = (0.12, 0.06), (0.03, 0.006), (0.3, 0.15)
NOISE = 0.1
FAR_OFF = 3.0  # times faster or slower than calibrated: then only the shape is taken from the calibration
REPEATED_RATE, REPEATED = 0.3, 0.05  # of the shape where a knot is off by this much twice in a row, the same way
DRAW_EVERY = 16  # observations between two looks at the bent shape: it moves slowly, looking is not free
DENSE_ROWS = 256  # up to here the curve is written out
LEAST_CALIBRATION, MOST_BENT = 4, 0.4  # a shape measured at so many points is bent by this much at most (log)
OUTLIER = 0.3  # one step moves the curve at most as if it were off by this share
CALIBRATION_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # each beside one row
CALIBRATION_CONTEXT = 128  # tokens before each row: a row reads its context, a draft's as well as a request's
CALIBRATION_ROUNDS, CALIBRATION_S = 4, 1.0  # as many rounds as fit into the time, one at least


class PassCostModel:
    """Plain lists, no arrays: it is asked and told once per step, about a handful of numbers."""

    def __init__(self, prior: Mapping[int, float] | None = None) -> None:
        """`prior`: rows -> seconds, any scale."""
        if not prior:
            prior = {1: 1.0, 2: 1.0 + GUESS_PER_ROW}
        self._log_shape = [math.log(_interpolate(sorted(prior.items()), knot)) for knot in KNOTS]
        self._measured = list(self._log_shape) if len(prior) >= LEAST_CALIBRATION else None
        self._level, self._request_s = 1.0, 0.0
        self._spread: list[float] = []  # variance of the level, covariance, variance of request_s
        self._curve: list[float] = []  # the shape at the knots, never falling
        self._dense: list[float] = []  # the same at 0, 1, 2, ... rows
        self._last_error = [0.0] * len(KNOTS)
        self._num_drafted = [0] * len(KNOTS)  # passes with drafts whose rows were nearest to each knot
        self._last_knot = self._other_knot = -1  # seen last, and before it another one
        self.num_observed = 0
        self._draw()
        self._begin_doubt()

    def at(self, rows: int, requests: int = 0) -> float:
        return self._level * self._shape(rows) + self._request_s * requests

    def between(self, fewest: int, most: int, requests: int) -> list[float]:
        """The same for each number of rows from the fewest to the most."""
        if most > DENSE_ROWS:
            return [self.at(rows, requests) for rows in range(fewest, most + 1)]
        level, requests_s = self._level, self._request_s * requests
        return [level * shape + requests_s for shape in self._dense[fewest : most + 1]]

    def _shape(self, rows: int) -> float:
        if rows <= DENSE_ROWS:
            return self._dense[rows]
        right = min(bisect.bisect_left(KNOTS, rows), len(KNOTS) - 1)
        left_rows, left = KNOTS[right - 1], self._curve[right - 1]
        slope = (self._curve[right] - left) / (KNOTS[right] - left_rows)
        return left + slope * (rows - left_rows)

    def observe(self, rows: int, seconds: float, requests: int = 0) -> None:
        self.num_observed += 1
        expected_s = self.at(rows, requests)
        if self.num_observed == 1 and (self._measured is None or not 1 / FAR_OFF < seconds / expected_s < FAR_OFF):
            self._level *= seconds / expected_s  # the scale of a guess says nothing, nor does that of another machine
            self._begin_doubt()
        else:
            error_s = min(OUTLIER * expected_s, max(-OUTLIER * expected_s, seconds - expected_s))
            self._correct(self._shape(rows), requests, error_s, NOISE * expected_s)
            # Plain passes do not bend it: a machine that became faster would make drafts seem dear that nobody tried.
            if requests != rows:
                self._bend(rows, error_s / expected_s, has_drafts=requests > 0)
        if self.num_observed % DRAW_EVERY == 0:
            self._draw()

    def _correct(self, shape: float, requests: int, error_s: float, noise_s: float) -> None:
        """A Kalman filter's step: the error is laid to what is known least."""
        level, both, request = self._spread
        unit = self._level * self._dense[1]
        level = min(level + (GAINED_DOUBT[0] * self._level) ** 2, (MOST_DOUBT[0] * self._level) ** 2)
        request = min(request + (GAINED_DOUBT[1] * unit) ** 2, (MOST_DOUBT[1] * unit) ** 2)
        most = 0.999 * math.sqrt(level * request)
        both = min(most, max(-most, both))
        to_level, to_request = level * shape + both * requests, both * shape + request * requests
        share = 1.0 / (shape * to_level + requests * to_request + noise_s * noise_s)
        self._level += share * to_level * error_s
        self._request_s = max(0.0, self._request_s + share * to_request * error_s)
        self._spread = [
            level - share * to_level * to_level,
            both - share * to_level * to_request,
            request - share * to_request * to_request,
        ]

    def _begin_doubt(self) -> None:
        of_level, of_request = FIRST_DOUBT
        self._spread = [(of_level * self._level) ** 2, 0.0, (of_request * self._level * self._dense[1]) ** 2]

    def _bend(self, rows: int, error: float, has_drafts: bool) -> None:
        """A knot that is wrong again in one direction, while another is not, is moved quickly. So is one that drafts
        show to be wrong, for what plain passes cost is known well; and all larger ones with it. What slows down the
        arithmetic of many rows slows down that of more, and what is thought too dear is not tried."""
        right = min(max(1, bisect.bisect_left(KNOTS, rows)), len(KNOTS) - 1)
        share = min(1.0, (rows - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1]))
        nearest = right if share >= 0.5 else right - 1
        before, self._last_error[nearest] = self._last_error[nearest], error
        if nearest != self._last_knot:
            self._last_knot, self._other_knot = nearest, self._last_knot
        repeated = before * error > 0.0 and min(abs(before), abs(error)) > REPEATED
        repeated = repeated and self._other_knot >= 0 and self._last_error[self._other_knot] * error <= 0.0
        rate = REPEATED_RATE if repeated else SHAPE_RATE
        if has_drafts:
            rate = max(rate, DRAFTED_RATE, FIRST_DRAFTED_RATE / (1 + self._num_drafted[nearest]))
            self._num_drafted[nearest] += 1
        amount = error * rate
        moved = [(right - 1, 1.0 - share), (right, share)]
        if has_drafts:
            moved += [(knot, 1.0) for knot in range(right + 1, len(KNOTS))]
        for knot, part in moved:
            bent = self._log_shape[knot] + part * amount
            if self._measured is not None:
                bent = min(self._measured[knot] + MOST_BENT, max(self._measured[knot] - MOST_BENT, bent))
            self._log_shape[knot] = bent

    def _draw(self) -> None:
        """Between the lowest curve above all knots to the left and the highest below all knots to the right."""
        above = list(itertools.accumulate(self._log_shape, max))
        below = list(itertools.accumulate(reversed(self._log_shape), min))[::-1]
        self._curve = [math.exp((a + b) / 2) for a, b in zip(above, below, strict=True)]
        self._dense = [self._curve[0]]
        knots = zip(itertools.pairwise(KNOTS), itertools.pairwise(self._curve), strict=True)
        for (left_rows, right_rows), (left, right) in knots:
            if left_rows > DENSE_ROWS:
                break
            slope = (right - left) / (right_rows - left_rows)
            self._dense += [left + slope * i for i in range(right_rows - left_rows)]

    def table(self, rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> dict[int, float]:
        """Of one request."""
        return {count: self.at(count, 1) for count in rows}


def _interpolate(points: list[tuple[int, float]], rows: int) -> float:
    """Straight lines between the points; beyond the last one the slope from the first to the last."""
    (first_rows, first_s), (last_rows, last_s) = points[0], points[-1]
    if rows <= first_rows or len(points) == 1:
        return first_s
    if rows >= last_rows:
        return last_s + max(0.0, last_s - first_s) / (last_rows - first_rows) * (rows - last_rows)
    right = bisect.bisect_left([count for count, _ in points], rows)
    (left_rows, left_s), (right_rows, right_s) = points[right - 1], points[right]
    return left_s + (right_s - left_s) * (rows - left_rows) / (right_rows - left_rows)


def calibrate(services: Services) -> dict[int, float]:
    """Rows -> seconds of a bare pass, measured on the model before anything runs; empty where there is no model.

    Each row is a request of its own, after a text that all of them share. The slots written are free: whoever gets them
    overwrites them."""
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
    batches = {rows: pack(single[:rows], block_size, services.device) for rows in sizes}
    if shared:  # the first pass of all, which prepares things as well
        text = RequestRows(shared, tokens[:num_shared], 0)
        decoder.forward(pack([text], block_size, services.device), kv_cache)

    def seconds(rows: int) -> float:
        pass_begin_s = time.perf_counter()
        float(decoder.forward(batches[rows], kv_cache).logits[0, 0])  # reading a value waits for the device
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
