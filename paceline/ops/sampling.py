"""From a node's logits to its token, or to its distribution.

Every row goes through the same two stages, whatever it is for (accepted, recovered or bonus token): the options that
edit logits (sampling_edits.py), then temperature and truncation (sampling_truncate.py). What is left is either

- drawn from:  `choose_tokens`, argmax(score + Gumbel noise keyed by the request's seed and the token's position), or
- handed over: `target_probs`, the distribution p itself, for rules that compare it with a drafter's q.

Temperature 0 is the argmax, the lowest id where tokens tie. A row that cannot be sampled (NaN or infinite logits,
nothing left) answers with an error and does not touch the others. On the host rows are handled one by one: a row of a
real vocabulary is wide enough to fill the vector units, and its result cannot depend on which rows came along.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.errors import RequestFailedError
from paceline.ops.random import GUMBEL_MAX, GUMBEL_MIN, Purpose, keyed_gumbel, noise_key
from paceline.ops.sampling_check import check_sampling
from paceline.ops.sampling_edits import NodeRow, edit_logits, needs_edit
from paceline.ops.sampling_logprobs import token_logprobs
from paceline.ops.sampling_truncate import NOTHING_TO_SAMPLE, FloatRow, IdRow, shortlist, truncated_scores

__all__ = [
    "NodeRow",
    "check_sampling",
    "choose_tokens",
    "host_logits",
    "noisy_scores",
    "row_probs",
    "target_probs",
    "token_logprobs",
]

T = TypeVar("T")

# A token this far below the likeliest one loses against it under any noise.
_NOISE_REACH = GUMBEL_MIN - GUMBEL_MAX


def choose_tokens(rows: Sequence[NodeRow], logits: Tensor) -> list[int | RequestFailedError]:
    """The target's own token for every row; `logits` is [any, vocab], a row says which line is its own."""
    if logits.device.type == "cpu":
        return [_guarded(_choose_on_host, row, logits) for row in rows]
    return _choose_on_device(rows, logits)


def target_probs(rows: Sequence[NodeRow], logits: Tensor) -> list[Tensor | RequestFailedError]:
    """p for every row, float64 [vocab] on the host: what `choose_tokens` draws from."""
    host = logits if logits.device.type == "cpu" else logits[[row.logits_row for row in rows]].cpu()
    if host is not logits:
        rows = [NodeRow(row.request, row.draft_ids, i) for i, row in enumerate(rows)]
    return [_guarded(row_probs, row, host) for row in rows]


def _guarded(compute: Callable[[NodeRow, Tensor], T], row: NodeRow, logits: Tensor) -> T | RequestFailedError:
    try:
        return compute(row, logits)
    except RequestFailedError as error:
        return error


def _edited(row: NodeRow, logits: Tensor) -> Tensor:  # -> [vocab]
    own = logits[row.logits_row]
    return edit_logits(row, own) if needs_edit(row) else own


def _greedy(logits: FloatRow) -> int:  # [vocab]
    best = int(logits.argmax())  # the first of equals; NaN before everything
    if not math.isfinite(logits[best]):
        raise RequestFailedError(NOTHING_TO_SAMPLE.format(logits[best]))
    return best


def host_logits(row: NodeRow, logits: Tensor) -> FloatRow:  # -> [vocab]
    """The row's logits after the options that edit them."""
    values: FloatRow = _edited(row, logits).numpy()
    return values


def noisy_scores(row: NodeRow, values: FloatRow) -> tuple[IdRow, FloatRow]:
    """The tokens that are left and their scores with the target's noise; the best of them is the target's token."""
    ids, scores = shortlist(values, row.request.sampling_params, floor=_NOISE_REACH)
    key = noise_key(row.request.seed, row.position, Purpose.SAMPLE)
    scores += keyed_gumbel([key], len(values), torch.from_numpy(ids))[0].numpy()
    return ids, scores


def row_probs(row: NodeRow, logits: Tensor) -> Tensor:  # -> [vocab] float64
    """The distribution that is left after all options; temperature 0 puts everything on the argmax."""
    values = host_logits(row, logits)
    params = row.request.sampling_params
    probs = torch.zeros(len(values), dtype=torch.float64)
    if params.greedy:
        probs[_greedy(values)] = 1.0
        return probs
    ids, scores = shortlist(values, params)
    weights = np.exp(scores, dtype=np.float64)
    probs.numpy()[ids] = weights / weights.sum()
    return probs


def _choose_on_host(row: NodeRow, logits: Tensor) -> int:
    values = host_logits(row, logits)
    if row.request.sampling_params.greedy:
        return _greedy(values)
    ids, scores = noisy_scores(row, values)
    return int(ids[scores.argmax()])


def _choose_on_device(rows: Sequence[NodeRow], logits: Tensor) -> list[int | RequestFailedError]:
    """All rows in one go, with one transfer to the host at the end."""
    edited: list[Tensor | RequestFailedError] = [_guarded(_edited, row, logits) for row in rows]
    blank = torch.full_like(logits[0], torch.nan)
    values = torch.stack([blank if isinstance(row, RequestFailedError) else row for row in edited])
    sampled = [i for i, row in enumerate(rows) if not row.request.sampling_params.greedy]
    if sampled:
        keys = [noise_key(rows[i].request.seed, rows[i].position, Purpose.SAMPLE) for i in sampled]
        noise = keyed_gumbel(keys, values.shape[-1], device=values.device)
        scores = truncated_scores(values[sampled], [rows[i].request.sampling_params for i in sampled])
        values[sampled] = scores + noise
    best = values.max(-1)
    answers: list[int | RequestFailedError] = []
    for row, token, value in zip(edited, best.indices.tolist(), best.values.tolist(), strict=True):
        if isinstance(row, RequestFailedError):
            answers.append(row)
        elif math.isfinite(value):
            answers.append(token)
        else:
            answers.append(RequestFailedError(NOTHING_TO_SAMPLE.format(value)))
    return answers
