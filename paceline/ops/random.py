"""Keyed noise: every random draw is a pure function of what it is for.

There is no generator and no state. A draw is named by (request seed, absolute position, purpose, index), hashed into a
64-bit key, and spread over the vocabulary by a second hash of (key, token id). So the token at position t is the same
whether it was decoded plainly, verified in a chain, in a tree, in a batch, or after a restart, and noise can be had for
a handful of candidate ids without touching the rest of the vocabulary.

    key = noise_key(seed=7, position=120, purpose=Purpose.SAMPLE)
    token = race(log_probs, keyed_uniform(key, vocab_size))      # ~ the distribution of log_probs

`race` is argmax(score + Gumbel noise): with E = -log(1 - u) exponential, -log E is Gumbel. The hashes are integer
arithmetic that wraps around, so the uniforms are the same bits on a CPU and a GPU, and in the native kernels
(ops/native/src/noise.inc).
"""

import enum
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.ops.sampling_types import FloatRow, IdRow, Probs

BitRow = npt.NDArray[np.uint32]

_MASK64 = (1 << 64) - 1
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


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


def noise_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], purpose: int
) -> npt.NDArray[np.uint64]:
    """`noise_key` for many draws at once; the arrays are broadcast."""
    keys = _mix64_rows(seeds ^ np.uint64(0x9E3779B97F4A7C15))
    return _mix64_rows(_mix64_rows(keys + positions) + np.uint64(purpose << 32))


def _mix64_rows(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed_coin(key: int) -> float:
    """One uniform number strictly between 0 and 1, of 52 bits.

    Never 0, so that `u < probability` cannot let an impossible token through; never 1, so that it always lets a
    certain one through."""
    return ((_mix64(key ^ 0xD1B54A32D192ED03) >> 12) + 0.5) * 2.0**-52


def pick(u: float, probs: Probs) -> int:  # any positive sum
    """The token in whose share of [0, total) u falls; tokens of probability 0 have no share."""
    cumulative = probs.cumsum()
    token = int(np.searchsorted(cumulative, cumulative[-1] * u, side="right"))
    if token < len(probs):
        return token
    return int(np.flatnonzero(probs)[-1])  # u * total was rounded up to the total itself


def _mix32_(x: BitRow, key: int = 0) -> BitRow:
    """Mix in place: multiply and xor-shift, with constants known for their low avalanche bias.

    `key` enters between the two multiplications, where neither half can undo it."""
    shifted = np.empty_like(x)
    x ^= np.right_shift(x, np.uint32(16), out=shifted)
    x *= np.uint32(_MULTIPLIERS[0])
    x ^= np.uint32(key)
    x ^= np.right_shift(x, np.uint32(15), out=shifted)
    x *= np.uint32(_MULTIPLIERS[1])
    x ^= np.right_shift(x, np.uint32(16), out=shifted)
    return x


def _mix_rows_(x: Tensor, keys: Tensor) -> Tensor:  # [rows, n] int32, [rows, 1] int32
    """`_mix32_` in int32, the only 32-bit numbers that every device multiplies; masks make the shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(_MULTIPLIERS[0])
    x ^= keys
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(_MULTIPLIERS[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(x: int) -> int:
    """32 bits read as a signed number."""
    return x - ((x >> 31) << 32)


@lru_cache(maxsize=32)
def _id_constants(size: int) -> BitRow:
    """A well-mixed constant for every token id, so that a row has to mix only once more."""
    ids = np.arange(1, size + 1, dtype=np.uint32)
    ids *= np.uint32(0x9E3779B1)
    return _mix32_(_mix32_(ids), 0x5BD1E995)


@lru_cache(maxsize=8)
def _id_constants_on(size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_id_constants(size).view(np.int32)).to(device)


def id_constants(size: int, ids: IdRow | None = None) -> BitRow:  # not to be written to
    """What, beside the key, the noise of a vocabulary of `size` is made from, or that of some of its ids."""
    return _id_constants(size) if ids is None else _id_constants(size)[ids]


def keyed_uniform(key: int, size: int, ids: IdRow | None = None) -> FloatRow:
    """Uniform numbers strictly between 0 and 1 for a vocabulary of `size`, or for some of its ids.

    They come from 31 bits and are finest near 0 (float32 cannot be fine near 1), the end that decides a race:
    a token that scores 25 below the best (odds of about 1e-11) is the first that cannot win."""
    bits = _mix32_(id_constants(size, ids) + np.uint32(key & 0xFFFFFFFF), key >> 32)
    bits &= np.uint32(0x7FFFFFFF)
    uniform = bits.view(np.int32).astype(np.float32)  # 31 bits, so signed and unsigned are the same; signed is faster
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-31)
    # Rounding to float32 makes 1.0 out of the topmost values.
    return np.minimum(uniform, np.float32(_BELOW_ONE), out=uniform)


def keyed_uniform_rows(keys: Sequence[int], size: int, device: torch.device | str) -> Tensor:
    """The same numbers for many keys at once, [len(keys), size], on any device."""
    pairs = [(_signed(key & 0xFFFFFFFF), _signed(key >> 32)) for key in keys]
    halves = torch.tensor(pairs, dtype=torch.int32, device=device)  # [keys, 2]
    bits = _mix_rows_(_id_constants_on(size, torch.device(device)) + halves[:, :1], halves[:, 1:])
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    return uniform.add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)


def keyed_noise(keys: Tensor, constants: Tensor) -> Tensor:
    """Standard Gumbel noise on any device: [rows, 2] int32 (low and high half of each key), [n] int32 (`id_constants`)
    -> [rows, n] float32"""
    bits = _mix_rows_(constants + keys[:, :1], keys[:, 1:]).bitwise_and_(0x7FFFFFFF)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE).double()
    return -torch.log(-torch.log1p(-uniform)).float()


def gumbel(uniform: FloatRow) -> Probs:
    """Standard Gumbel noise, in float64: -log of an exponential variable."""
    u = uniform.astype(np.float64)
    noise: Probs = -np.log(-np.log1p(-u))
    return noise


def race(scores: FloatRow, uniform: FloatRow) -> int:
    """argmax(scores + gumbel(uniform)), the first where they tie, without a logarithm for every token.

    With w = exp(score) the winner has the least E / w, and E = -log(1 - u) is never below u. So u / w is a lower bound;
    the token with the least bound says how good one has to be, and only those whose bound is as good are looked at."""
    with np.errstate(over="ignore"):
        inverse_weights = np.exp(-scores)
    lower = uniform * inverse_weights
    first = int(lower.argmin())
    exponential = -np.log1p(-np.float64(uniform[first]))
    reach = np.float32(exponential * inverse_weights[first] * 1.001)  # room for the rounding of float32
    contenders = np.flatnonzero(lower <= reach)
    exact = scores[contenders] + gumbel(uniform[contenders])
    return int(contenders[exact.argmax()])
