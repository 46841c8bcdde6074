"""The likeliest tokens of a drafter's logits, with the target's noise where asked for: no scores go to memory.

A program takes a stretch of one row's vocabulary: it adds noise, keeps its K best scores, and the logarithm of the sum
of their exponentials. What is left, K scores of each stretch, is little, and PyTorch picks the best of those.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.noise import gumbel, uniform_of

STRETCH = 1024  # ids of a program


class Noise(Protocol):
    @property
    def scales(self) -> Tensor: ...  # [R] float32: of logits that get noise; 0: none

    @property
    def noise_keys(self) -> Tensor: ...  # [R, L, 2] int32

    @property
    def id_constants(self) -> Tensor | None: ...  # [vocab] int32


@triton.jit(do_not_specialize=["level"])
def _top_kernel(
    logits, out_scores, out_ids, out_sums, scales, keys, constants, level, vocab,
    WIDTH: tl.constexpr, LEVELS: tl.constexpr, K: tl.constexpr, STRETCH: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    row, stretch, stretches = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = stretch * STRETCH + tl.arange(0, STRETCH)
    ok = ids < vocab
    scores = tl.load(logits + row * vocab + ids, mask=ok, other=float("-inf"))
    if NOISY:
        request = row // WIDTH
        scale = tl.load(scales + request)
        if scale > 0.0:
            low = tl.load(keys + (request * LEVELS + level) * 2)
            high = tl.load(keys + (request * LEVELS + level) * 2 + 1)
            constant = tl.load(constants + ids, mask=ok, other=0)
            scores = scores * scale + gumbel(uniform_of(constant, low, high))
            scores = tl.where(ok, scores, float("-inf"))
    top = tl.max(scores, axis=0)
    at = row * stretches + stretch
    tl.store(out_sums + at, top + tl.log(tl.sum(tl.exp(scores - top), axis=0)))
    for i in range(K):
        place = tl.argmax(scores, axis=0)
        tl.store(out_scores + at * K + i, tl.max(scores, axis=0))
        tl.store(out_ids + at * K + i, stretch * STRETCH + place)
        scores = tl.where(tl.arange(0, STRETCH) == place, float("-inf"), scores)


def likeliest_tokens(
    logits: Tensor,  # [R, W, vocab] float32
    noise: Noise,
    level: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Ids (int64) and log-probabilities, [R, W, k], likeliest first."""
    num_requests, width, vocab = logits.shape
    rows, stretches = num_requests * width, triton.cdiv(vocab, STRETCH)
    scores = torch.empty(rows, stretches * k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, stretches * k, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, stretches, dtype=torch.float32, device=logits.device)
    noisy = noise.id_constants is not None
    _top_kernel[(rows, stretches)](
        logits.contiguous(), scores, ids, sums, noise.scales, noise.noise_keys,
        noise.id_constants if noisy else ids, level, vocab,
        WIDTH=width, LEVELS=noise.noise_keys.shape[1], K=k, STRETCH=STRETCH, NOISY=noisy, num_warps=4,
    )  # fmt: skip
    best, places = scores.topk(k, dim=1)
    log_probs = best - sums.logsumexp(1, keepdim=True)
    return ids.gather(1, places).long().view(-1, width, k), log_probs.view(-1, width, k)
