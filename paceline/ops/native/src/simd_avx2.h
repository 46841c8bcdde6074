// Sixteen lanes in two registers: AVX2 with FMA and F16C, and with PL_BYTE_DOTS the byte dot products of AVX-VNNI. Sums
// of products are exact either way, so both have the same bits. See simd_avx512.h for the vocabulary.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace {

struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
struct vb { __m256i a, b; };

constexpr int kFloatRows = 4, kQuantRows = 4, kPanels = 1, kQueries = 4;
constexpr int kKeyBlocks = 1, kValueQueries = 1;
#if defined(PL_BYTE_DOTS)
constexpr bool kOffset8 = true;  // dot4_s8 wants weights + 128 and adds 128 * sum(x): start from the negative
#else
constexpr bool kOffset8 = false;  // dot4_s8 is a signed product here
#endif

inline vf vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vstore(float* p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline vf vset1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf vadd(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf vsub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf vmul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf vdiv(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf vfma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline vf vrecip(vf a) { return vdiv(vset1(1.0f), a); }
inline void vkeep(vf&) {}
inline void vkeep(vi&) {}
inline void vsink(vf x) { asm volatile("" : : "x"(x.a), "x"(x.b)); }
inline vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf vmin(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf vabs(vf x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float sfma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline vf vround(vf x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline vi vto_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline vf vto_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline vi viadd(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline vi viset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline vi vset4(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return viset1(four);
}
inline vi vload_ints(const uint32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline vi vimul(vi x, vi y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline vi vixor(vi x, vi y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline vi viand(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int bits>
inline vi vishift_left(vi x) { return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)}; }
template <int bits>
inline vi vishift_right(vi x) { return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)}; }
inline vi vbits(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline vf vfrom_bits(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline __m256i add_times255_half(__m256i a, __m256i b) {
  return _mm256_sub_epi32(_mm256_add_epi32(a, _mm256_slli_epi32(b, 8)), b);
}
inline vi vadd_times255(vi x, vi y) { return {add_times255_half(x.a, y.a), add_times255_half(x.b, y.b)}; }
inline __m256 pow2_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline vf vpow2(vf n) { return {pow2_half(n.a), pow2_half(n.b)}; }

inline __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf vload_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline vf vload_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void vstore_f16(uint16_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m256 i8_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline vf vload_i8(const int8_t* p) { return {i8_half(p), i8_half(p + 8)}; }
inline void vstore_i8(int8_t* p, vi x) {
  alignas(32) int32_t lanes[16];
  _mm256_store_si256((__m256i*)lanes, x.a);
  _mm256_store_si256((__m256i*)(lanes + 8), x.b);
  for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}

inline void vstore_i16(int16_t* p, vi x) {
  alignas(32) int32_t lanes[16];
  _mm256_store_si256((__m256i*)lanes, x.a);
  _mm256_store_si256((__m256i*)(lanes + 8), x.b);
  int16_t shorts[16];
  for (int i = 0; i < 16; i++) shorts[i] = (int16_t)lanes[i];
  __builtin_memcpy(p, shorts, 32);
}
inline void vstore_i16s(int16_t* p, vi a, vi b) { vstore_i16(p, a); vstore_i16(p + 16, b); }
inline void vstore_ints(int32_t* p, vi x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
inline vi dot2_s16(vi acc, vi x, vi y) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}

inline float hsum(vf x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float hmax(vf x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline int32_t hsum_int(vi x) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256((__m256i*)lanes, _mm256_add_epi32(x.a, x.b));
  int32_t sum = 0;
  for (int i = 0; i < 8; i++) sum += lanes[i];
  return sum;
}

inline vb vload_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline vb vlow_nibbles(vb x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline vb vhigh_nibbles(vb x) { return vlow_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
#if defined(PL_BYTE_DOTS)
inline __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, w, x);
#else
  return _mm256_dpbusd_epi32(acc, w, x);  // the same in AVX-512's encoding, for tests where there is no other
#endif
}
inline vi dot4_u7(vi acc, vb w, vi x) { return {dot4_half(acc.a, w.a, x.a), dot4_half(acc.b, w.b, x.a)}; }
inline vi dot4_s8(vi acc, vb w, vi x) { return dot4_u7(acc, w, x); }
#else
// Pairs of products stay below 2^15 because w < 128 and |x| <= 127.
inline __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
inline vi dot4_u7(vi acc, vb w, vi x) { return {dot4_half(acc.a, w.a, x.a), dot4_half(acc.b, w.b, x.a)}; }
// w is stored + 128. |w| * sign(x, w) is the signed product with an unsigned left side, again below 2^15 in pairs.
inline __m256i dot4_signed_half(__m256i acc, __m256i w, __m256i x) {
  w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return dot4_half(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
inline vi dot4_s8(vi acc, vb w, vi x) {
  return {dot4_signed_half(acc.a, w.a, x.a), dot4_signed_half(acc.b, w.b, x.a)};
}
#endif

inline void transpose16(const vf in[16], float* out) {
  for (int half = 0; half < 2; half++) {    // d in [8 * half, 8 * half + 8)
    for (int quad = 0; quad < 2; quad++) {  // lanes [8 * quad, 8 * quad + 8)
      __m256 r[8], a[8], b[8];
      for (int i = 0; i < 8; i++) r[i] = half ? in[8 * quad + i].b : in[8 * quad + i].a;
      for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
      }
      for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(out + 16 * (8 * half + c) + 8 * quad, _mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
        _mm256_storeu_ps(out + 16 * (8 * half + 4 + c) + 8 * quad, _mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
      }
    }
  }
}

}  // namespace
