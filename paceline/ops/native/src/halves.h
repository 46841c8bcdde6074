// Sixteen-bit floats, one at a time: for packing, for single rows, and for the portable kernels.
#pragma once
#include <string.h>
#include <cstdint>

namespace {

inline float bits_to_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

inline float bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

// To nearest, ties to even, as torch rounds; a NaN stays a (quiet) NaN.
inline uint16_t float_to_bf16(float f) {
  uint32_t bits = float_to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float value = (float)mantissa * 0x1p-24f;  // subnormal
  return sign ? -value : value;
}

inline uint16_t float_to_f16(float f) {
  uint32_t bits = float_to_bits(f), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (magnitude < 0x38800000) {                                   // below 2^-14: a multiple of 2^-24
    // Adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum, for any such magnitude.
    return (uint16_t)(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
  }
  uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

}  // namespace
