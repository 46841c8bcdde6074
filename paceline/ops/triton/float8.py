"""FP8 numbers (e4m3) of the KV cache, in registers: two of a 16-bit word, to be multiplied, and one, to be stored.

A word holds the numbers of an even place (its lower byte) and of the odd one behind it. Words of 16 bits reach a
product of tensor cores by the same way as bfloat16 numbers do; bytes would not, where they stand across the product.

A GPU widens two numbers by one instruction, exactly, not-a-number included. Triton's interpreter, and float32, do it by
arithmetic. Stored are the nearest numbers, ties to even, at most 448: `as_float8` of core/kv_tensor.py is the twin.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
EXPONENTS = tl.constexpr(2.0**120)  # between those of e4m3 and of float32
SMALLEST_NORMAL = tl.constexpr(2.0**-6)
LARGEST = tl.constexpr(448.0)
UNITS = tl.constexpr(2.0**14)  # a float32 of this size has steps of 2^-9, as the smallest e4m3 numbers
UNITS_BITS = tl.constexpr(0x46800000)
# Of a register with two words, four numbers: those of the lower bytes, and those of the upper ones.
WIDEN = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)


@triton.jit
def _float32_of(bits):
    """bits: int32, of one number"""
    made = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * EXPONENTS
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), made)


@triton.jit
def widened_pairs(words, dtype: tl.constexpr):
    """int16 words -> the numbers of even places, those of odd ones. dtype: float16 or float32, which have them all"""
    if INTERPRETED or dtype == tl.float32:
        wide = words.to(tl.int32)
        return _float32_of(wide & 0xFF).to(dtype), _float32_of((wide >> 8) & 0xFF).to(dtype)
    else:  # noqa: RET505 (this one is for the compiler)
        return tl.inline_asm_elementwise(
            WIDEN, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip


@triton.jit
def narrowed(x):
    """The bits of each number: uint8"""
    wide = x.to(tl.float32)
    bits = wide.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(wide), LARGEST)
    size_bits = size.to(tl.int32, bitcast=True)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + UNITS).to(tl.int32, bitcast=True) - UNITS_BITS
    made = tl.where(size < SMALLEST_NORMAL, small, normal)
    made = tl.where(wide != wide, 0x7F, made)
    return (made | ((bits >> 24) & 0x80)).to(tl.uint8)
