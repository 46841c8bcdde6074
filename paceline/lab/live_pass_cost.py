"""The cost curve of a running engine: what a step of n rows for b requests costs, learned from the steps.

    seconds = level x shape(rows) + request_s x requests

The shape is kept at a few row counts (knots) with straight lines between them. Before the first step it comes from a
short calibration of the model itself, where one is at hand. Every step that only decodes is one observation: level and
request_s follow quickly (a Kalman filter of two numbers), the shape slowly.

What decides about speculation is what one more row costs, and that is why the requests have a term of their own: they
bring contexts to read and answers to take in, however many rows they have. Steps without drafts cannot tell the two
apart. Then most of what the calibration did not predict is attributed to the requests, and the first drafts correct it:
an error in that direction is found, while rows that are thought too expensive are never tried.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.lab.pass_cost import PassCost

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GUESS_PER_ROW = 0.06  # without a calibration: each further row costs this much of the first
# How quickly the shape follows; and what passes with drafts show, the first ones of about so many rows and later ones.
SHAPE_RATE, FIRST_DRAFTED_RATE, DRAFTED_RATE = 0.03, 0.25, 0.1
# Standard deviations: of the level (relative) and of request_s (in passes of one row), at first, gained from one
# observation to the next, and at most; and of an observation (relative), of a plain pass and of one with drafts: that
# shows what rows cost, and where most passes have drafts the level would take the blame for a wrong shape.
FIRST_DOUBT, GAINED_DOUBT, MOST_DOUBT = (0.12, 0.06), (0.03, 0.006), (0.3, 0.15)
NOISE, DRAFTED_NOISE = 0.1, 1.0
FAR_OFF = 3.0  # times faster or slower than calibrated: then only the shape is taken from the calibration
REPEATED_RATE, REPEATED = 0.3, 0.05  # of the shape where a knot is off by this much twice in a row, the same way
DRAW_EVERY = 16  # observations between two computations of the shape: it changes slowly, and computing takes time
DENSE_ROWS = 256  # up to here the curve is written out
LEAST_CALIBRATION, MOST_BENT = 4, 0.4  # a shape measured at so many points is bent by this much at most (log)
OUTLIER = 0.3  # one step moves the curve at most as if it were off by this share
KEPT = 0.5  # of how far the shape was from the measured one: the next start begins with so much


class PassCostModel:
    """Plain lists, no arrays: it is asked and told once per step, about a handful of numbers."""

    def __init__(self, prior: PassCost | Mapping[int, float] | None = None) -> None:
        """`prior`: a measured curve, or rows -> seconds, any scale."""
        curve = prior if isinstance(prior, PassCost) else PassCost.of(prior or {1: 1.0, 2: 1.0 + GUESS_PER_ROW})
        self._log_shape = [math.log(curve.with_mean_slope()(knot)) for knot in KNOTS]
        self._measured = list(self._log_shape) if len(curve.rows) >= LEAST_CALIBRATION else None
        self._level, self._request_s = 1.0, 0.0
        self._spread: list[float] = []  # variance of the level, covariance, variance of request_s
        self._curve = curve  # the shape at the knots, never falling
        self._dense: list[float] = []  # the same at 0, 1, 2, ... rows
        self._last_error = [0.0] * len(KNOTS)
        self._num_drafted = [0] * len(KNOTS)  # passes with drafts whose rows were nearest to each knot
        self._last_knot = self._other_knot = -1  # seen last, and before it another one
        self.num_observed = 0
        self._draw()
        self._begin_doubt()

    def learned(self) -> dict[str, Any]:
        """For the next start: how far the shape is from the measured one at each knot, and what a request takes, in
        passes of one row."""
        measured = self._measured or self._log_shape
        bent = [now - before for now, before in zip(self._log_shape, measured, strict=True)]
        return {"bent": bent, "request": self._request_s / (self._level * self._dense[1])}

    def begin_with(self, bent: Sequence[float], request: float) -> None:
        """What another start's `learned` said. What passes show here corrects it as quickly as a measured shape."""
        if self._measured is None:
            return
        self._log_shape = [
            before + KEPT * min(MOST_BENT, max(-MOST_BENT, far))
            for before, far in zip(self._measured, bent, strict=True)
        ]
        self._draw()
        self._request_s = min(MOST_DOUBT[1], max(0.0, request)) * self._level * self._dense[1]

    def at(self, rows: int, requests: int = 0) -> float:
        return self._level * self._shape(rows) + self._request_s * requests

    def between(self, fewest: int, most: int, requests: int) -> list[float]:
        """The same for each number of rows from the fewest to the most."""
        if most > DENSE_ROWS:
            return [self.at(rows, requests) for rows in range(fewest, most + 1)]
        level, requests_s = self._level, self._request_s * requests
        return [level * shape + requests_s for shape in self._dense[fewest : most + 1]]

    def _shape(self, rows: int) -> float:
        return self._dense[rows] if rows <= DENSE_ROWS else self._curve(rows)

    def observe(self, rows: int, seconds: float, requests: int = 0) -> None:
        self.num_observed += 1
        expected_s = self.at(rows, requests)
        if self.num_observed == 1 and (self._measured is None or not 1 / FAR_OFF < seconds / expected_s < FAR_OFF):
            self._level *= seconds / expected_s  # the scale of a guess says nothing, nor does that of another machine
            self._begin_doubt()
        else:
            error_s = min(OUTLIER * expected_s, max(-OUTLIER * expected_s, seconds - expected_s))
            noise = DRAFTED_NOISE if 0 < requests < rows else NOISE
            self._correct(self._shape(rows), requests, error_s, noise * expected_s)
            # Plain passes do not change the shape: if the machine became faster, untried drafts would seem expensive.
            if requests != rows:
                self._bend(rows, error_s / expected_s, has_drafts=requests > 0)
        if self.num_observed % DRAW_EVERY == 0:
            self._draw()

    def _correct(self, shape: float, requests: int, error_s: float, noise_s: float) -> None:
        """A Kalman filter's step: the error is attributed to what is known least."""
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
        arithmetic of many rows slows down that of more, and what is thought too expensive is not tried."""
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
        shape = [math.exp((a + b) / 2) for a, b in zip(above, below, strict=True)]
        self._curve = PassCost(KNOTS, tuple(shape))
        self._dense = [shape[0]]
        knots = zip(itertools.pairwise(KNOTS), itertools.pairwise(shape), strict=True)
        for (left_rows, right_rows), (left, right) in knots:
            if left_rows > DENSE_ROWS:
                break
            slope = (right - left) / (right_rows - left_rows)
            self._dense += [left + slope * i for i in range(right_rows - left_rows)]

    def table(self, rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> dict[int, float]:
        """Of one request."""
        return {count: self.at(count, 1) for count in rows}
