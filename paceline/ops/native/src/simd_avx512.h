// Sixteen lanes in one register: AVX-512 with VNNI byte dot products.
//
// The three simd_*.h files define the same small vocabulary, and kernels.inc is compiled once over each. A lane never
// looks at its neighbours except in hsum/hmax, whose order is fixed; that is what makes every row's bits its own.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace {

typedef __m512 vf;   // 16 floats
typedef __m512i vi;  // 16 int32
typedef __m512i vb;  // 64 bytes: 16 outputs x 4 consecutive k

constexpr int kFloatRows = 8, kQuantRows = 6, kPanels = 2, kQueries = 12;  // register blocking
constexpr int kKeyBlocks = 2, kValueQueries = 6;
constexpr bool kOffset8 = true;  // dot4_s8 wants weights + 128 and adds 128 * sum(x): start from the negative

inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, vf a) { _mm512_storeu_ps(p, a); }
inline vf vset1(float a) { return _mm512_set1_ps(a); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline vf vrecip(vf a) {  // 1 / a to about 1 ulp: two Newton steps from 14 bits, several times faster than a division
  vf r = _mm512_rcp14_ps(a);
  r = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r);
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r);
}
inline void vkeep(vf& a) { asm("" : "+v"(a)); }  // loaded once into a register, not again at each use
inline void vkeep(vi& a) { asm("" : "+v"(a)); }
inline void vsink(vf a) { asm volatile("" : : "v"(a)); }  // computed, though nothing uses it
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vabs(vf a) { return _mm512_abs_ps(a); }
inline float sfma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi vto_int(vf a) { return _mm512_cvtps_epi32(a); }
inline vf vto_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vi viadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi viset1(int32_t a) { return _mm512_set1_epi32(a); }
inline vi vset4(const int8_t* p) {  // four bytes in every lane
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
inline vi vload_ints(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline vi vimul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }  // the low 32 bits
inline vi vixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
inline vi viand(vi a, vi b) { return _mm512_and_si512(a, b); }
template <int bits>
inline vi vishift_left(vi a) { return _mm512_slli_epi32(a, bits); }
template <int bits>
inline vi vishift_right(vi a) { return _mm512_srli_epi32(a, bits); }  // zeros come in
inline vi vbits(vf a) { return _mm512_castps_si512(a); }
inline vf vfrom_bits(vi a) { return _mm512_castsi512_ps(a); }
inline vi vadd_times255(vi a, vi b) { return _mm512_sub_epi32(_mm512_add_epi32(a, _mm512_slli_epi32(b, 8)), b); }  // a + 255 * b
// 2^n for integral n in [-126, 127]
inline vf vpow2(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

inline vf vload_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void vstore_f16(uint16_t* p, vf a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline vf vload_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline void vstore_i8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }

inline void vstore_i16(int16_t* p, vi a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a)); }
inline void vstore_i16s(int16_t* p, vi a, vi b) {  // both, one after the other
  const __m512i even = _mm512_setr_epi32(0x20000, 0x60004, 0xa0008, 0xe000c, 0x120010, 0x160014, 0x1a0018, 0x1e001c,
                                         0x220020, 0x260024, 0x2a0028, 0x2e002c, 0x320030, 0x360034, 0x3a0038, 0x3e003c);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(a, even, b));
}
inline void vstore_ints(int32_t* p, vi a) { _mm512_storeu_si512(p, a); }
// += the two products of a lane. In assembly, because GCC 12 moves the sums of a loop between registers and memory.
inline vi dot2_s16(vi acc, vi a, vi b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}

inline float hsum(vf a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float hmax(vf a) { return _mm512_reduce_max_ps(a); }
inline int32_t hsum_int(vi a) { return _mm512_reduce_add_epi32(a); }

inline vb vload_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline vb vlow_nibbles(vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline vb vhigh_nibbles(vb a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
// acc[lane] += sum over 4 bytes of w (unsigned) * x (signed, the same four for every lane)
inline vi dot4_u7(vi acc, vb w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline vi dot4_s8(vi acc, vb w, vi x) { return _mm512_dpbusd_epi32(acc, w, x); }

// out[d][16] = in[lane][d] for 16 values of d; `in` are 16 loaded rows.
inline void transpose16(const vf in[16], float* out) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(in[i], in[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  // b[4q + c]: 128-bit part j holds column 4j + c of rows 4q .. 4q + 3
  for (int c = 0; c < 4; c++) {
    __m512 lo01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x44), hi01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xee);
    __m512 lo23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x44),
           hi23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xee);
    _mm512_storeu_ps(out + 16 * c, _mm512_shuffle_f32x4(lo01, lo23, 0x88));
    _mm512_storeu_ps(out + 16 * (4 + c), _mm512_shuffle_f32x4(lo01, lo23, 0xdd));
    _mm512_storeu_ps(out + 16 * (8 + c), _mm512_shuffle_f32x4(hi01, hi23, 0x88));
    _mm512_storeu_ps(out + 16 * (12 + c), _mm512_shuffle_f32x4(hi01, hi23, 0xdd));
  }
}

}  // namespace
