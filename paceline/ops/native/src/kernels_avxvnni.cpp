// AVX2 with byte dot products in one instruction (AVX-VNNI: processors of laptops and desktops that lack AVX-512). Built
// with the flags of build.py's table; without them, by a compiler that does not know them, or on other machines, null.
#include "kernels.h"
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define PL_BYTE_DOTS
#include "simd_avx2.h"
#define TABLE kernels_avxvnni
#define NAME "avx-vnni"
#include "kernels.inc"
const Kernels* const kernels_avxvnni_or_null = &kernels_avxvnni;
#elif defined(__x86_64__)
const Kernels* const kernels_avxvnni_or_null = nullptr;
#endif
