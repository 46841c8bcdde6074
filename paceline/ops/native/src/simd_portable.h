// Sixteen lanes as plain C++: works everywhere, and the compiler vectorizes what it can. No fused multiply-add: a
// machine without one would call a slow library routine. See simd_avx512.h for the vocabulary.
#pragma once
#include <math.h>
#include <string.h>
#include <cstdint>

#include "halves.h"

namespace {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));  // for what may wrap around
struct vb { uint8_t byte[64]; };

constexpr int kFloatRows = 4, kQuantRows = 4, kPanels = 1, kQueries = 4;
constexpr int kKeyBlocks = 1, kValueQueries = 1;
constexpr bool kOffset8 = false;

inline vf vload(const float* p) { vf a; memcpy(&a, p, 64); return a; }
inline void vstore(float* p, vf a) { memcpy(p, &a, 64); }
inline vf vset1(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vdiv(vf a, vf b) { return a / b; }
#if defined(PL_FUSED)  // as a twin of kernels that have one
inline float sfma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline vf vfma(vf a, vf b, vf c) { for (int i = 0; i < 16; i++) c[i] = sfma(a[i], b[i], c[i]); return c; }
#else
inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
inline float sfma(float a, float b, float c) { return a * b + c; }
#endif
inline vf vrecip(vf a) { return vdiv(vset1(1.0f), a); }
inline void vkeep(vf&) {}
inline void vkeep(vi&) {}
inline void vsink(vf a) { asm volatile("" : : "m"(a)); }
inline vf vmax(vf a, vf b) { for (int i = 0; i < 16; i++) a[i] = a[i] > b[i] ? a[i] : b[i]; return a; }
inline vf vmin(vf a, vf b) { for (int i = 0; i < 16; i++) a[i] = a[i] < b[i] ? a[i] : b[i]; return a; }
inline vf vabs(vf a) { for (int i = 0; i < 16; i++) a[i] = fabsf(a[i]); return a; }
inline vf vround(vf a) { for (int i = 0; i < 16; i++) a[i] = rintf(a[i]); return a; }
inline vi vto_int(vf a) { vi r{}; for (int i = 0; i < 16; i++) r[i] = (int32_t)rintf(a[i]); return r; }
inline vf vto_float(vi a) { vf r{}; for (int i = 0; i < 16; i++) r[i] = (float)a[i]; return r; }
inline vi viadd(vi a, vi b) { return (vi)((vu)a + (vu)b); }
inline vi viset1(int32_t x) { return vi{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline vi vset4(const int8_t* p) { int32_t four; memcpy(&four, p, 4); return viset1(four); }
inline vi vload_ints(const uint32_t* p) { vi a; memcpy(&a, p, 64); return a; }
inline vi vimul(vi a, vi b) { return (vi)((vu)a * (vu)b); }
inline vi vixor(vi a, vi b) { return a ^ b; }
inline vi viand(vi a, vi b) { return a & b; }
template <int bits>
inline vi vishift_left(vi a) { return (vi)((vu)a << bits); }
template <int bits>
inline vi vishift_right(vi a) { return (vi)((vu)a >> bits); }
inline vi vbits(vf a) { return (vi)a; }
inline vf vfrom_bits(vi a) { return (vf)a; }
inline vi vadd_times255(vi a, vi b) { return a + 255 * b; }
inline vf vpow2(vf n) {
  vi bits{};
  for (int i = 0; i < 16; i++) bits[i] = (int32_t)((uint32_t)((int32_t)n[i] + 127) << 23);
  vf r;
  memcpy(&r, &bits, 64);
  return r;
}

inline vf vload_bf16(const uint16_t* p) { vf r{}; for (int i = 0; i < 16; i++) r[i] = bf16_to_float(p[i]); return r; }
inline vf vload_f16(const uint16_t* p) { vf r{}; for (int i = 0; i < 16; i++) r[i] = f16_to_float(p[i]); return r; }
inline void vstore_f16(uint16_t* p, vf a) { for (int i = 0; i < 16; i++) p[i] = float_to_f16(a[i]); }
inline vf vload_i8(const int8_t* p) { vf r{}; for (int i = 0; i < 16; i++) r[i] = (float)p[i]; return r; }
inline void vstore_i8(int8_t* p, vi a) { for (int i = 0; i < 16; i++) p[i] = (int8_t)a[i]; }

inline void vstore_i16(int16_t* p, vi a) {
  int16_t shorts[16];
  for (int i = 0; i < 16; i++) shorts[i] = (int16_t)a[i];
  memcpy(p, shorts, 32);
}
inline void vstore_i16s(int16_t* p, vi a, vi b) { vstore_i16(p, a); vstore_i16(p + 16, b); }
inline void vstore_ints(int32_t* p, vi a) { memcpy(p, &a, 64); }
inline vi dot2_s16(vi acc, vi a, vi b) {
  for (int i = 0; i < 16; i++)
    acc[i] += (int32_t)(int16_t)a[i] * (int16_t)b[i] + (a[i] >> 16) * (b[i] >> 16);
  return acc;
}

inline float hsum(vf a) {
  float s[16];
  vstore(s, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) s[i] += s[i + width];
  return s[0];
}
inline float hmax(vf a) { float m = a[0]; for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m; return m; }
inline int32_t hsum_int(vi a) { int32_t s = 0; for (int i = 0; i < 16; i++) s += a[i]; return s; }

inline vb vload_bytes(const uint8_t* p) { vb r; memcpy(r.byte, p, 64); return r; }
inline vb vlow_nibbles(vb a) { for (int i = 0; i < 64; i++) a.byte[i] &= 15; return a; }
inline vb vhigh_nibbles(vb a) { for (int i = 0; i < 64; i++) a.byte[i] >>= 4; return a; }
inline vi dot4_u7(vi acc, vb w, vi x) {
  int8_t xs[4];
  memcpy(xs, &x, 4);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) acc[i] += (int32_t)w.byte[4 * i + j] * xs[j];
  return acc;
}
inline vi dot4_s8(vi acc, vb w, vi x) {
  int8_t xs[4];
  memcpy(xs, &x, 4);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) acc[i] += ((int32_t)w.byte[4 * i + j] - 128) * xs[j];
  return acc;
}

inline void transpose16(const vf in[16], float* out) {
  for (int d = 0; d < 16; d++)
    for (int lane = 0; lane < 16; lane++) out[16 * d + lane] = in[lane][d];
}

}  // namespace
