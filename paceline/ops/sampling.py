"""From a node's logits to its token, or to its distribution.

Every row goes through the same two stages, whatever it is for (accepted, recovered or bonus token): the options that
edit logits (sampling_edits.py), then temperature and truncation (sampling_truncate.py). What is left is either

- drawn from:  `choose_tokens`, argmax(score + Gumbel noise keyed by the request's seed and the token's position), or
- handed over: `target_probs`, the distribution p itself, for rules that compare it with a drafter's q.

A temperature of 0 (or next to it, `SamplingParams.greedy`) is the argmax, the lowest id where tokens tie. A row that
cannot be sampled (NaN or infinite logits, nothing left, a logits processor that raises) answers with an error and does
not touch the others. On the host rows are handled one by one: a row of a real vocabulary is wide enough to fill the
vector units, and its result cannot depend on which rows came along.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.faults import request_error
from paceline.core.request import Request
from paceline.errors import NothingToSampleError, RequestFailedError
from paceline.ops.native.noise import race_winner
from paceline.ops.random import Purpose, gumbel, keyed_uniform, keyed_uniform_rows, noise_key, race
from paceline.ops.sampling_check import check_sampling
from paceline.ops.sampling_edits import NodeRow, edit_logits, may_need_edit, needs_edit, only_grammar_edits
from paceline.ops.sampling_logprobs import token_logprobs
from paceline.ops.sampling_truncate import nothing_to_sample, shortlist, truncated_scores, truncates
from paceline.ops.sampling_types import FloatRow, Probs

__all__ = [
    "NodeRow",
    "check_sampling",
    "choose_tokens",
    "chosen_before_mask",
    "drawn_from_logits_alone",
    "edited_logits",
    "row_noisy_scores",
    "row_probs",
    "row_token",
    "target_probs",
    "token_logprobs",
]

T = TypeVar("T")


def choose_tokens(rows: Sequence[NodeRow], logits: Tensor) -> list[int | RequestFailedError]:
    """The target's own token for every row; `logits` is [any, vocab], a row says which line is its own."""
    if logits.device.type == "cpu":
        return [_guarded(row_token, row, logits) for row in rows]
    return _choose_on_device(rows, logits)


def drawn_from_logits_alone(request: Request, vocab_size: int) -> bool:
    """Whether greedy or a temperature is all there is to its sampling, so that a kernel can draw its tokens.

    A property of the request and not of a row: two ways of drawing agree up to rounding, so a request keeps to one."""
    params = request.sampling_params
    return params.logprobs is None and not truncates(params, vocab_size) and not may_need_edit(request)


def chosen_before_mask(request: Request, vocab_size: int) -> bool:
    """Whether its tokens are chosen as if it had no grammar, then shown to the grammar (`_settled_token`)."""
    constraint = request.constraint
    return (
        constraint is not None
        and constraint.is_quick_to_ask
        and only_grammar_edits(request)
        and not truncates(request.sampling_params, vocab_size)
    )


def target_probs(rows: Sequence[NodeRow], logits: Tensor) -> list[Probs | RequestFailedError]:
    """p for every row: what `choose_tokens` draws from."""
    return [_guarded(row_probs, row, logits) for row in rows]


def _guarded(compute: Callable[[NodeRow, Tensor], T], row: NodeRow, logits: Tensor) -> T | RequestFailedError:
    begin_s = time.perf_counter()
    try:
        return compute(row, logits)
    except NothingToSampleError as error:
        best = float(logits[row.logits_row].max())
        # Where the model itself left nothing, its logits are at fault and not the options.
        return error if math.isfinite(best) else RequestFailedError(f"the model's largest logit is {best}")
    except BaseException as error:
        return request_error("sampling", error)
    finally:
        row.request.sampling_s += time.perf_counter() - begin_s


def edited_logits(row: NodeRow, logits: Tensor) -> FloatRow:  # -> [vocab], not to be written to
    """The row's logits after the options that edit them, on the host."""
    own: FloatRow = logits[row.logits_row].cpu().numpy()
    return edit_logits(row, own) if needs_edit(row) else own


def row_token(row: NodeRow, logits: Tensor) -> int:
    settled = _settled_token(row, logits)
    if settled is not None:
        return settled
    values = edited_logits(row, logits)
    params = row.request.sampling_params
    if params.greedy:
        return _greedy(values)
    key = _sample_key(row)
    if not truncates(params, len(values)):
        token = race_winner(values, params.temperature, key)
        if token is not None:
            return token
    ids, scores = shortlist(values, params)
    winner = race(scores, keyed_uniform(key, len(values), ids))
    return winner if ids is None else int(ids[winner])


def _settled_token(row: NodeRow, logits: Tensor) -> int | None:
    """The token that would be chosen without the grammar, where the grammar allows it, or the only one that it allows:
    with the mask the same would be chosen. None: the mask has to say.

    The first of the largest logits stays that when others are taken out. If it is allowed, scores are the same numbers
    with and without the mask, and the winner of all tokens, if allowed, wins among the allowed ones."""
    request = row.request
    if not chosen_before_mask(request, logits.shape[-1]):
        return None
    assert request.constraint is not None
    values: FloatRow = logits[row.logits_row].cpu().numpy()
    best = int(values.argmax())
    settled = request.constraint.settled(row.draft_ids, best)
    if settled is None or not math.isfinite(values[settled]):
        return None
    if request.sampling_params.greedy or settled != best:
        return settled
    winner = race_winner(values, request.sampling_params.temperature, _sample_key(row))
    return winner if winner is None or winner == best else request.constraint.settled(row.draft_ids, winner)


def row_noisy_scores(row: NodeRow, logits: Tensor) -> Probs:  # -> [vocab], -inf where a token is out
    """The scores whose argmax `row_token` is: with the target's noise, or just the logits at temperature 0."""
    values = edited_logits(row, logits)
    if row.request.sampling_params.greedy:
        return values.astype(np.float64)
    ids, scores = shortlist(values, row.request.sampling_params)
    noisy = np.full(len(values), -np.inf)
    noisy[slice(None) if ids is None else ids] = scores + gumbel(keyed_uniform(_sample_key(row), len(values), ids))
    return noisy


def row_probs(row: NodeRow, logits: Tensor) -> Probs:  # -> [vocab]
    """The distribution that is left after all options; temperature 0 puts everything on the argmax."""
    values = edited_logits(row, logits)
    params = row.request.sampling_params
    probs = np.zeros(len(values))
    if params.greedy:
        probs[_greedy(values)] = 1.0
        return probs
    ids, scores = shortlist(values, params)
    weights = np.exp(scores, dtype=np.float64)
    probs[slice(None) if ids is None else ids] = weights / weights.sum()
    return probs


def _sample_key(row: NodeRow) -> int:
    return noise_key(row.request.seed, row.position, Purpose.SAMPLE)


def _greedy(values: FloatRow) -> int:
    best = int(values.argmax())  # the first of equals; NaN before everything
    if not math.isfinite(values[best]):
        raise nothing_to_sample(float(values[best]))
    return best


def _choose_on_device(rows: Sequence[NodeRow], logits: Tensor) -> list[int | RequestFailedError]:
    """All rows in one go, with one transfer to the host at the end; rows with edits are edited on the host."""
    failed: dict[int, RequestFailedError] = {}
    values = logits[[row.logits_row for row in rows]]
    for i, row in enumerate(rows):
        if needs_edit(row):
            edited = _guarded(edited_logits, row, logits)
            if isinstance(edited, RequestFailedError):
                failed[i] = edited
            else:
                values[i] = torch.from_numpy(edited).to(values.device)
    sampled = [i for i, row in enumerate(rows) if not row.request.sampling_params.greedy]
    if sampled:
        uniform = keyed_uniform_rows([_sample_key(rows[i]) for i in sampled], values.shape[-1], values.device)
        scores = truncated_scores(values[sampled], [rows[i].request.sampling_params for i in sampled])
        values[sampled] = scores - uniform.neg_().log1p_().neg_().log_()
    best = values.max(-1)
    answers: list[int | RequestFailedError] = []
    for i, (token, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
        if i in failed:
            answers.append(failed[i])
        elif math.isfinite(value):
            answers.append(token)
        else:  # the host says what is wrong with it
            answers.append(_guarded(row_token, rows[i], logits))
    return answers
