// NEON with byte matrix products (i8mm: Graviton 3 and later, Apple's M2 and later). Built with the flags of build.py's
// table; without them, by a compiler that does not know them, or on other machines, null.
#include "kernels.h"
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
#define PL_BYTE_MATRICES
#include "simd_neon.h"
#define TABLE kernels_neon_i8mm
#define NAME "neon-i8mm"
#include "kernels.inc"
const Kernels* const kernels_neon_i8mm_or_null = &kernels_neon_i8mm;
#elif defined(__aarch64__)
const Kernels* const kernels_neon_i8mm_or_null = nullptr;
#endif
