// Built with the flags of build.py's table; empty on other machines than x86-64.
#if defined(__x86_64__)
#include "simd_avx512.h"
#define TABLE kernels_avx512
#define NAME "avx512-vnni"
#include "kernels.inc"
#endif
