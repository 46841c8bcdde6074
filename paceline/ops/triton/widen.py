"""Values of 4 and 8 bits out of 16-bit words (ops/packed.py), in registers, for the product that follows.

The bits of an integer become the upper end of a float's mantissa: that is 16 + q for 4 bits and 256 + q for 8, and one
fused multiply-add makes (q - zero) * scale of it. The bits of an FP8 number become those of a float that is 2^120
times too small. On a GPU two neighbouring words, which share a register, are taken apart by instructions that the
compiler does not find: it would first widen each word, at the price of all that follows. Triton's interpreter takes the
same steps word by word.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FLOAT8_FACTOR = tl.constexpr(2.0**120)  # between the exponents of e4m3 and of float32 and bfloat16


@triton.constexpr_function
def _integers_asm(FORMAT, PART):
    """Of a register with two words: the values of a part, as floats 16 + q or 256 + q."""
    left, mask, offset = (19 - 4 * PART, 0x780000, 0x41800000) if FORMAT == 1 else (15 - 8 * PART, 0x7F8000, 0x43800000)
    high = f"shl.b32 t, $2, {left - 16};" if left >= 16 else f"shr.u32 t, $2, {16 - left};"
    take = f"0x{mask:X}, 0x{offset:X}, 0xEA"  # (a & b) | c
    return f"{{ .reg .b32 t; shl.b32 t, $2, {left}; lop3.b32 $0, t, {take}; {high} lop3.b32 $1, t, {take}; }}"


@triton.constexpr_function
def _whole_asm(PART):
    """Of a register with two words: 128 + q of a part in bfloat16, plus the second argument."""
    return (
        f"{{ .reg .b32 t, u; shr.u32 t, $1, {4 * PART}; lop3.b32 t, t, 0xF000F, 0x43004300, 0xEA; "
        "mov.b32 u, 0x3F803F80; fma.rn.bf16x2 $0, t, u, $2; }"
    )


@triton.constexpr_function
def _float8_asm(PART):
    """Of a register with two words: the numbers of a part, in bfloat16."""
    first = "shl.b32 u, $1, 8;" if PART == 0 else "mov.b32 u, $1;"
    return (
        f"{{ .reg .b32 t, u, f, z; {first} shr.u32 t, u, 4; and.b32 t, t, 0x07F007F0; "
        "lop3.b32 t, u, 0x80008000, t, 0xEA; mov.b32 f, 0x7B807B80; mov.b32 z, 0x80008000; "
        "fma.rn.bf16x2 $0, t, f, z; }"
    )


@triton.jit
def _integers(words, PART: tl.constexpr, FORMAT: tl.constexpr):
    """float32: 16 + q or 256 + q"""
    if INTERPRETED:
        wide = words.to(tl.int32)
        if FORMAT == 1:
            bits = ((wide << (19 - 4 * PART)) & 0x780000) | 0x41800000
        else:
            bits = ((wide << (15 - 8 * PART)) & 0x7F8000) | 0x43800000
    else:
        bits = tl.inline_asm_elementwise(
            _integers_asm(FORMAT, PART), "=r,=r,r", [words], dtype=tl.int32, is_pure=True, pack=2
        )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float8(words, PART: tl.constexpr):
    """[IN, OUT] float32"""
    wide = words.to(tl.int32)
    sign = (wide << (24 - 8 * PART)) & -2147483648
    bits = ((wide << (20 - 8 * PART)) & 0x7F00000) | sign
    return bits.to(tl.float32, bitcast=True) * FLOAT8_FACTOR


@triton.jit
def widened(words, pair, PART: tl.constexpr, FORMAT: tl.constexpr, ONE_GROUP: tl.constexpr, dtype: tl.constexpr):
    """The values of one part of the words ([IN, OUT] or [OUT, IN]), times their scale. `pair`: int32, [1, OUT] or
    [OUT, 1]: scale and zero in float16, the zero of 4-bit values less 8; with ONE_GROUP the scale is 1. FORMAT 4 leaves
    it to the sum."""
    if FORMAT == 4:
        zero = _halves(pair, 1)
        if INTERPRETED or dtype != tl.bfloat16:
            made = ((words.to(tl.int32) >> (4 * PART)) & 15).to(tl.float32) - (zero + 8.0)
        else:
            rest = (-136.0 - zero).to(tl.bfloat16)
            made = tl.inline_asm_elementwise(
                _whole_asm(PART), "=r,r,r", [words, rest], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    elif FORMAT == 3:
        if INTERPRETED or dtype != tl.bfloat16:
            made = _float8(words, PART)
        else:
            made = tl.inline_asm_elementwise(
                _float8_asm(PART), "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        if not ONE_GROUP:
            made = made.to(tl.float32) * _halves(pair, 0)
    else:
        offset: tl.constexpr = 24.0 if FORMAT == 1 else 256.0
        made, zero = _integers(words, PART, FORMAT), _halves(pair, 1)
        if ONE_GROUP:
            made -= zero + offset
        else:
            scale = _halves(pair, 0)
            made = tl.fma(made, scale, -((zero + offset) * scale))
    return made.to(dtype)


@triton.jit
def first_half(pair):
    return _halves(pair, 0)


@triton.jit
def _halves(pair, PLACE: tl.constexpr):
    """The first or second float16 of an int32, as float32."""
    return (pair >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
