"""Keyed noise: every random draw is a pure function of what it is for.

There is no generator and no state. A draw is named by (request seed, absolute position, purpose, index), hashed into a
64-bit key, and spread over the vocabulary by a second hash of (key, token id). So the token at position t is the same
whether it was decoded plainly, verified in a chain, in a tree, in a batch, or after a restart, and noise can be had for
a handful of candidate ids without touching the rest of the vocabulary.

    key = noise_key(seed=7, position=120, purpose=Purpose.SAMPLE)
    token = (log_probs + keyed_gumbel([key], vocab_size)).argmax(-1)      # ~ the distribution of log_probs

The hashes are integer arithmetic that wraps around, so the uniforms are the same bits on a CPU and on a GPU; the Gumbel
noise then differs by at most the rounding of a logarithm.
"""

import enum
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# keyed_gumbel stays within these (with room for rounding). Noise is that of the ideal distribution up to 2^-31, so a
# token GUMBEL_MAX - GUMBEL_MIN = 25 below the likeliest one (odds of about 1e-11) is never drawn.
GUMBEL_MIN = -2.82
GUMBEL_MAX = 22.19

_MASK64 = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """What a draw decides. Two purposes never share noise."""

    SAMPLE = 1  # the target's own token at a position; coupled drafters use it too
    DRAFT = 2  # a draft token, drawn from the drafter's distribution
    ACCEPT = 3  # the coin that lets a draft token through
    RECOVER = 4  # the token emitted where no draft token was let through
    BONUS = 5  # the token emitted after an accepted leaf


def _mix64(x: int) -> int:
    """The finaliser of splitmix64: a bijection that flips half of the output bits for any flipped input bit."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def noise_key(seed: int, position: int, purpose: int, index: int = 0) -> int:
    """The 64-bit name of a draw. `index` tells draws of one kind at one position apart (node, attempt, ...)."""
    # Each part is added after the parts before it were mixed, so no two names meet by simple arithmetic.
    key = _mix64((seed & _MASK64) ^ 0x9E3779B97F4A7C15)
    key = _mix64(key + position & _MASK64)
    return _mix64(key + (purpose << 32) + index & _MASK64)


def keyed_coin(key: int) -> float:
    """One uniform number strictly between 0 and 1, of 52 bits.

    Never 0, so that `u < probability` cannot let an impossible token through; never 1, so that it always lets a
    certain one through."""
    return ((_mix64(key ^ 0xD1B54A32D192ED03) >> 12) + 0.5) * 2.0**-52


def pick(u: float, probs: Tensor) -> int:  # [vocab] float64, any positive sum
    """The token in whose share of [0, total) u falls; tokens of probability 0 have no share."""
    cumulative = probs.cumsum(0)
    token = int(torch.searchsorted(cumulative, cumulative[-1] * u, right=True))
    if token < len(probs):
        return token
    return int(probs.nonzero()[-1])  # u * total was rounded up to the total itself


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits on the unsigned reading of int32; the operator itself would drag the sign along."""
    return (x >> bits).bitwise_and_((1 << 32 - bits) - 1)


def _mix32_(x: Tensor, key: Tensor | None = None) -> Tensor:
    """Mix int32 in place (multiply and xor-shift, constants found by search for low avalanche bias).

    `key` enters halfway, between the two multiplications, so that it is not undone by the first half."""
    x.bitwise_xor_(_logical_shift(x, 16)).mul_(0x7FEB352D)
    if key is not None:
        x.bitwise_xor_(key)
    x.bitwise_xor_(_logical_shift(x, 15)).mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_(_logical_shift(x, 16))


@lru_cache(maxsize=32)
def _id_constants(size: int, device: torch.device) -> Tensor:
    """[size] int32: a well-mixed constant for every token id, so that each row only has to mix once."""
    ids = torch.arange(1, size + 1, dtype=torch.int32, device=device)
    return _mix32_(_mix32_(ids.mul_(0x9E3779B1 - (1 << 32))).bitwise_xor_(0x5BD1E995))


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def keyed_bits(keys: Sequence[int], size: int, ids: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits per (key, token id) as int32, [len(keys), size]; with `ids` [n] only those columns."""
    constants = _id_constants(size, torch.device(device))
    if ids is not None:
        constants = constants[ids]
    halves = [[_signed32(key & 0xFFFFFFFF), _signed32(key >> 32)] for key in keys]
    halves_t = torch.tensor(halves, dtype=torch.int32, device=device).reshape(len(keys), 2)
    bits = constants + halves_t[:, :1]  # [keys, columns]
    return _mix32_(bits, halves_t[:, 1:])


def keyed_uniform(
    keys: Sequence[int], size: int, ids: Tensor | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Uniform numbers strictly between 0 and 1, float32 [len(keys), size or len(ids)].

    They come from 31 bits and are finest near 0 (float32 cannot be fine near 1), the end that decides who wins a
    Gumbel race."""
    bits = keyed_bits(keys, size, ids, device).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    # Rounding to float32 would make 1.0 out of the topmost values; the largest number below 1 stands for them.
    return bits.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)


def keyed_gumbel(
    keys: Sequence[int], size: int, ids: Tensor | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard Gumbel noise, float32 [len(keys), size or len(ids)]; within GUMBEL_MIN..GUMBEL_MAX."""
    # -log of an Exp(1) variable; -log1p(-u) keeps the fine end of u where the noise is largest.
    return keyed_uniform(keys, size, ids, device).neg_().log1p_().neg_().log_().neg_()
