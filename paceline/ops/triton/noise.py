"""The keyed noise of ops/random.py inside a kernel: the same 64-bit keys, the same uniform numbers, bit for bit."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _mix64(x):
    x ^= x >> 30
    x *= tl.full((), 0xBF58476D1CE4E5B9, dtype=tl.uint64)
    x ^= x >> 27
    x *= tl.full((), 0x94D049BB133111EB, dtype=tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position, PURPOSE: tl.constexpr):
    """random.noise_key(seed, position, PURPOSE), for blocks of int64 seeds and integer positions -> uint64"""
    key = _mix64(seed.to(tl.uint64) ^ tl.full((), 0x9E3779B97F4A7C15, dtype=tl.uint64))
    key = _mix64(key + position.to(tl.uint64))
    return _mix64(key + (tl.full((), PURPOSE, dtype=tl.uint64) << 32))


@triton.jit
def _mix32(x, key):
    x ^= x >> 16
    x *= tl.full((), 0x7FEB352D, dtype=tl.uint32)
    x ^= key
    x ^= x >> 15
    x *= tl.full((), 0x846CA68B, dtype=tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def keyed_uniform(keys, ids):
    """random.keyed_uniform: keys [rows] uint64, ids [n] int32 -> [rows, n] float32 between 0 and 1"""
    zero = tl.full((), 0, dtype=tl.uint32)
    constants = (ids + 1).to(tl.uint32) * tl.full((), 0x9E3779B1, dtype=tl.uint32)
    constants = _mix32(_mix32(constants, zero), tl.full((), 0x5BD1E995, dtype=tl.uint32))
    low, high = keys.to(tl.uint32), (keys >> 32).to(tl.uint32)
    bits = _mix32(constants[None, :] + low[:, None], high[:, None])
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    return tl.minimum(uniform, 0.99999994)  # 1 - 2 ** -24, the largest float32 below 1


@triton.jit
def uniform_of(constants, low, high):
    """The same from ready-made constants of ids, [n] int32, and the halves of one key, int32 -> [n] float32"""
    bits = _mix32(
        constants.to(tl.uint32, bitcast=True) + low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    )
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    return tl.minimum(uniform, 0.99999994)  # 1 - 2 ** -24, the largest float32 below 1


@triton.jit
def gumbel(uniform):
    """-log(-log(1 - u)), exact to rounding also where u is tiny: the end that decides who wins."""
    rest = 1.0 - uniform
    lost = 1.0 - rest  # what of u is left after rounding; log(rest) / lost corrects for the difference
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)
