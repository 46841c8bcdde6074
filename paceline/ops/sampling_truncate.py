"""Temperature, min_p, top_k and top_p: which tokens are left, and with what scores.

Scores are (logits - max) / temperature, so the likeliest token scores 0 at any temperature and nothing overflows. Each
option keeps the tokens above some score, in vLLM's order: min_p, then top_k among what is left, then top_p among that.

- min_p keeps p >= min_p * max p.
- top_k keeps the k best and whatever ties with the last of them.
- top_p keeps a token while the likelier ones together have less than top_p; equal tokens count in id order.

`shortlist` is the fast path for a row on the host: thresholds and sorts of small candidate sets instead of a sort of
the vocabulary. `truncated_scores` is its plain twin, vectorised over rows, for any device.
"""

import math

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampling_params import SamplingParams
from paceline.errors import NothingToSampleError, RequestFailedError
from paceline.ops.sampling_types import FloatRow, IdRow, Mask, Probs

_FEW = 4096  # candidates that are sorted as they are, without looking for a tighter threshold
_RANGES_PER_UNIT, _NUM_RANGES = 64, 4096  # of scores, where there are more: the last range holds what is below -64


def nothing_to_sample(best: float) -> RequestFailedError:
    """The error of a row whose largest logit is not a number that can be sampled from."""
    if best == -math.inf:
        return NothingToSampleError(
            "nothing can be sampled: allowed_token_ids, bad_words, min_tokens and the logits processors together left "
            "no token. Allow another one, or forbid fewer"
        )
    return RequestFailedError(
        f"nothing can be sampled: the largest logit is {best}. The model, or a logits processor, gave NaN or infinity"
    )


def truncates(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `shortlist` leaves anything out."""
    return params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < vocab_size


def shortlist(logits: FloatRow, params: SamplingParams) -> tuple[IdRow | None, FloatRow]:
    """The ids that are left, ascending, and their scores; None for the ids where nothing truncates."""
    best = logits[logits.argmax()]  # NaN wins argmax, so this one number shows every way a row can be unusable
    if not math.isfinite(best):
        raise nothing_to_sample(float(best))
    scores = logits - best
    scores /= np.float32(params.temperature)
    lowest = _log_min_p(params.min_p)
    if 0 < params.top_k < len(scores):
        lowest = max(lowest, _kth_largest(scores, params.top_k))
    if params.top_p < 1.0:
        return _nucleus(scores, params.top_p, lowest)
    if lowest == -math.inf:
        return None, scores
    ids = np.flatnonzero(scores >= np.float32(lowest))
    return ids, scores[ids]


def _log_min_p(min_p: float) -> float:
    return float(np.float32(math.log(min_p))) if min_p > 0 else -math.inf


def _kth_largest(scores: FloatRow, k: int) -> float:
    """Found among the scores above a threshold that is lowered until enough are left."""
    threshold = -4.0
    while np.count_nonzero(scores >= threshold) < k:
        if threshold < -1e3:  # masked tokens, or a temperature near 0
            return float(np.partition(scores, len(scores) - k)[len(scores) - k])
        threshold *= 2
    candidates = scores[np.flatnonzero(scores >= threshold)]
    return float(np.partition(candidates, len(candidates) - k)[len(candidates) - k])


def _nucleus(scores: FloatRow, top_p: float, lowest: float) -> tuple[IdRow, FloatRow]:
    """top_p among the tokens with scores >= lowest."""
    ids, total = _nucleus_candidates(scores, top_p, lowest)
    kept = scores[ids]
    if len(kept) < _FEW:
        surely, doubtful, before = np.zeros(len(kept), dtype=bool), np.ones(len(kept), dtype=bool), 0.0
    else:
        surely, doubtful, before, total = _narrowed(kept, top_p, total)
    close = kept[doubtful]
    descending = np.sort(close)[::-1]
    cumulative = before + np.cumsum(_weights(descending))
    wanted = top_p * (cumulative[-1] if total is None else total)
    num_kept = min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, len(descending))
    last = descending[num_kept - 1]
    above = close > last
    tied = np.flatnonzero(close == last)[: num_kept - int(np.count_nonzero(above))]
    above[tied] = True
    surely[doubtful] = above
    return ids[surely], kept[surely]


def _weights(scores: FloatRow) -> Probs:
    return np.exp(scores, dtype=np.float64)


def _narrowed(kept: FloatRow, top_p: float, total: float | None) -> tuple[Mask, Mask, float, float]:
    """For wide distributions, where a sort would take long: which tokens are surely in, which have to be sorted, what
    the former weigh, and what all tokens weigh. The weights of ranges of scores say where the nucleus ends."""
    ranges = np.minimum(kept * np.float32(-_RANGES_PER_UNIT), np.float32(_NUM_RANGES - 1)).astype(np.int64)
    cumulative = np.cumsum(np.bincount(ranges, weights=_weights(kept), minlength=_NUM_RANGES))
    total = float(cumulative[-1]) if total is None else total
    last = min(int(np.searchsorted(cumulative, top_p * total, side="left")), int(ranges.max()))
    before = float(cumulative[last - 1]) if last else 0.0
    return ranges < last, ranges == last, before, total


def _nucleus_candidates(scores: FloatRow, top_p: float, lowest: float) -> tuple[IdRow, float | None]:
    """Tokens above a threshold that is lowered until they weigh enough, and what all tokens weigh (None: as these)."""
    everything = np.flatnonzero(scores >= np.float32(lowest))
    if len(everything) < _FEW:
        return everything, None
    weights = np.exp(scores)
    total = float((weights if lowest == -math.inf else weights[everything]).sum(dtype=np.float64))
    threshold = -4.0
    while threshold > max(lowest, -1e3):
        ids = np.flatnonzero(scores >= np.float32(threshold))
        if float(weights[ids].sum(dtype=np.float64)) > top_p * total * (1.0 + 1e-5):  # clear of any rounding
            return ids, total
        threshold *= 2
    return everything, None


def truncated_scores(logits: Tensor, params: list[SamplingParams]) -> Tensor:  # [rows, vocab] -> [rows, vocab]
    """Scores with -inf where a token is out. A row that cannot be sampled comes out as NaN."""
    device = logits.device
    scores = logits - logits.amax(-1, keepdim=True)  # inf - inf and NaN: the row stays NaN
    scores /= torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device)
    min_p = torch.tensor([[_log_min_p(p.min_p)] for p in params], dtype=torch.float32, device=device)
    scores = scores.masked_fill(scores < min_p, -torch.inf)
    vocab = scores.shape[-1]
    if any(0 < p.top_k < vocab for p in params):
        k = torch.tensor([[p.top_k if 0 < p.top_k < vocab else vocab] for p in params], device=device)
        kth = scores.sort(-1, descending=True).values.gather(-1, k - 1)
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if any(p.top_p < 1.0 for p in params):
        top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        weights = ordered.double().exp()
        cumulative = weights.cumsum(-1)
        before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))  # weight of the likelier tokens
        outside = (before >= top_p * cumulative[:, -1:]) & (top_p < 1.0)
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return scores
