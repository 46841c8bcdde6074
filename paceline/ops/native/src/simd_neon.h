// Sixteen lanes in four registers: ARM NEON with byte dot products (dotprod), and with PL_BYTE_MATRICES the byte matrix
// products of i8mm, whose sums are as exact. See simd_avx512.h for the vocabulary.
//
// Every operation rounds as its namesake in simd_portable.h does with fused multiply-adds, so that a plain C++ twin gives
// the same bits (tests/ops/native_parity.cpp).
#pragma once
#include <arm_neon.h>
#include <cstdint>

// All that a product calls becomes part of it: left to itself GCC 12 stops halfway, and sums go through memory.
#define PL_FLATTEN __attribute__((flatten))

namespace {

struct vf { float32x4_t v[4]; };
struct vi { int32x4_t v[4]; };
struct vb { uint8x16_t v[4]; };  // 16 outputs x 4 consecutive k

constexpr int kFloatRows = 4, kQuantRows = 4, kPanels = 1, kQueries = 4;  // register blocking
constexpr int kKeyBlocks = 1, kValueQueries = 1;
constexpr bool kOffset8 = false;  // dot4_s8 is a signed product here

template <typename To, typename F>
inline To each(F f) {
  To r;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) r.v[i] = f(i);
  return r;
}

inline vf vload(const float* p) { return each<vf>([&](int i) { return vld1q_f32(p + 4 * i); }); }
inline void vstore(float* p, vf a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]); }
inline vf vset1(float x) { return each<vf>([&](int) { return vdupq_n_f32(x); }); }
inline vf vadd(vf a, vf b) { return each<vf>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
inline vf vsub(vf a, vf b) { return each<vf>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
inline vf vmul(vf a, vf b) { return each<vf>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
inline vf vfma(vf a, vf b, vf c) { return each<vf>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
inline float sfma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline vf vrecip(vf a) { return each<vf>([&](int i) { return vdivq_f32(vdupq_n_f32(1.0f), a.v[i]); }); }
inline void vkeep(vf&) {}
inline void vkeep(vi&) {}
inline void vsink(vf a) { asm volatile("" : : "w"(a.v[0]), "w"(a.v[1]), "w"(a.v[2]), "w"(a.v[3])); }
// By comparison, which gives back the second where one is NaN; vmaxq would give NaN.
inline vf vmax(vf a, vf b) {
  return each<vf>([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline vf vmin(vf a, vf b) {
  return each<vf>([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline vf vabs(vf a) { return each<vf>([&](int i) { return vabsq_f32(a.v[i]); }); }
inline vf vround(vf a) { return each<vf>([&](int i) { return vrndnq_f32(a.v[i]); }); }
inline vi vto_int(vf a) { return each<vi>([&](int i) { return vcvtnq_s32_f32(a.v[i]); }); }
inline vf vto_float(vi a) { return each<vf>([&](int i) { return vcvtq_f32_s32(a.v[i]); }); }
inline vi viadd(vi a, vi b) { return each<vi>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); }); }
inline vi viset1(int32_t x) { return each<vi>([&](int) { return vdupq_n_s32(x); }); }
inline vi vset4(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return viset1(four);
}
inline vi vload_ints(const uint32_t* p) {
  return each<vi>([&](int i) { return vreinterpretq_s32_u32(vld1q_u32(p + 4 * i)); });
}
inline vi vimul(vi a, vi b) { return each<vi>([&](int i) { return vmulq_s32(a.v[i], b.v[i]); }); }
inline vi vixor(vi a, vi b) { return each<vi>([&](int i) { return veorq_s32(a.v[i], b.v[i]); }); }
inline vi viand(vi a, vi b) { return each<vi>([&](int i) { return vandq_s32(a.v[i], b.v[i]); }); }
template <int bits>
inline vi vishift_left(vi a) { return each<vi>([&](int i) { return vshlq_n_s32(a.v[i], bits); }); }
template <int bits>
inline vi vishift_right(vi a) {
  return each<vi>([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), bits)); });
}
inline vi vbits(vf a) { return each<vi>([&](int i) { return vreinterpretq_s32_f32(a.v[i]); }); }
inline vf vfrom_bits(vi a) { return each<vf>([&](int i) { return vreinterpretq_f32_s32(a.v[i]); }); }
inline vi vadd_times255(vi a, vi b) {
  return each<vi>([&](int i) { return vsubq_s32(vaddq_s32(a.v[i], vshlq_n_s32(b.v[i], 8)), b.v[i]); });
}
inline vf vpow2(vf n) {
  return each<vf>([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
  });
}

inline vf vload_bf16(const uint16_t* p) {
  return each<vf>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline vf vload_f16(const uint16_t* p) {
  return each<vf>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void vstore_f16(uint16_t* p, vf a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline vf vload_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t half[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
  return each<vf>([&](int i) {
    return vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(half[i / 2]) : vget_low_s16(half[i / 2])));
  });
}
inline void vstore_i8(int8_t* p, vi a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline void vstore_i16(int16_t* p, vi a) { for (int i = 0; i < 4; i++) vst1_s16(p + 4 * i, vmovn_s32(a.v[i])); }
inline void vstore_i16s(int16_t* p, vi a, vi b) { vstore_i16(p, a); vstore_i16(p + 16, b); }
inline void vstore_ints(int32_t* p, vi a) { for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, a.v[i]); }
inline vi dot2_s16(vi acc, vi a, vi b) {
  return each<vi>([&](int i) {
    const int16x8_t x = vreinterpretq_s16_s32(a.v[i]), y = vreinterpretq_s16_s32(b.v[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vaddq_s32(acc.v[i], vpaddq_s32(low, high));
  });
}

// Lane i with lane i + 8, then + 4, + 2, + 1.
inline float hsum(vf a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float hmax(vf a) {
  float lanes[16];
  vstore(lanes, a);
  float most = lanes[0];
  for (int i = 1; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}
inline int32_t hsum_int(vi a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}

inline vb vload_bytes(const uint8_t* p) { return each<vb>([&](int i) { return vld1q_u8(p + 16 * i); }); }
inline vb vlow_nibbles(vb a) { return each<vb>([&](int i) { return vandq_u8(a.v[i], vdupq_n_u8(15)); }); }
inline vb vhigh_nibbles(vb a) { return each<vb>([&](int i) { return vshrq_n_u8(a.v[i], 4); }); }
// Weights are below 128, so that they are the same signed.
inline vi dot4_u7(vi acc, vb w, vi x) {
  return each<vi>([&](int i) {
    return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), vreinterpretq_s8_s32(x.v[i]));
  });
}
inline vb vminus128(vb a) { return each<vb>([&](int i) { return veorq_u8(a.v[i], vdupq_n_u8(128)); }); }
inline vi dot4_s8(vi acc, vb w, vi x) { return dot4_u7(acc, vminus128(w), x); }  // w is stored + 128

#if defined(PL_BYTE_MATRICES)  // for row_pairs.inc, which says how the lanes lie
inline void vjoin(vb& a, vb& b) {
  for (int i = 0; i < 4; i++) {
    const uint32x4_t x = vreinterpretq_u32_u8(a.v[i]), y = vreinterpretq_u32_u8(b.v[i]);
    a.v[i] = vreinterpretq_u8_u32(vzip1q_u32(x, y));
    b.v[i] = vreinterpretq_u8_u32(vzip2q_u32(x, y));
  }
}
inline void vswap_pairs(vi& a, vi& b) {  // the second two lanes of a's registers with the first two of b's
  for (int i = 0; i < 4; i++) {
    const int64x2_t x = vreinterpretq_s64_s32(a.v[i]), y = vreinterpretq_s64_s32(b.v[i]);
    a.v[i] = vreinterpretq_s32_s64(vzip1q_s64(x, y));
    b.v[i] = vreinterpretq_s32_s64(vzip2q_s64(x, y));
  }
}
inline vi vset8_of_two(const int8_t* p, const int8_t* q) {
  const int8x16_t both = vcombine_s8(vld1_s8(p), vld1_s8(q));
  return each<vi>([&](int) { return vreinterpretq_s32_s8(both); });
}
inline vi dot8_of_two(vi acc, vb w, vi x) {
  return each<vi>([&](int i) {
    return vmmlaq_s32(acc.v[i], vreinterpretq_s8_s32(x.v[i]), vreinterpretq_s8_u8(w.v[i]));
  });
}
#endif

inline void transpose16(const vf in[16], float* out) {
  for (int lanes = 0; lanes < 4; lanes++) {  // 4 x 4 at a time: lanes [4 * lanes, + 4), dimensions [4 * d, + 4)
    for (int d = 0; d < 4; d++) {
      const float32x4_t r0 = in[4 * lanes].v[d], r1 = in[4 * lanes + 1].v[d];
      const float32x4_t r2 = in[4 * lanes + 2].v[d], r3 = in[4 * lanes + 3].v[d];
      const float64x2_t even01 = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)), odd01 = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
      const float64x2_t even23 = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)), odd23 = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
      float* to = out + 16 * 4 * d + 4 * lanes;
      vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(even01, even23)));
      vst1q_f32(to + 16, vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23)));
      vst1q_f32(to + 32, vreinterpretq_f32_f64(vtrn2q_f64(even01, even23)));
      vst1q_f32(to + 48, vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23)));
    }
  }
}

}  // namespace
