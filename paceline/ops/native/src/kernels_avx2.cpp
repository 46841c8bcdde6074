// Built with the flags of build.py's table; empty on other machines than x86-64.
#if defined(__x86_64__)
#include "simd_avx2.h"
#define TABLE kernels_avx2
#define NAME "avx2"
#include "kernels.inc"
#endif
