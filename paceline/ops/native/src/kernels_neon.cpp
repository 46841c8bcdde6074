// Built with the flags of build.py's table; empty on other machines than 64-bit ARM.
#if defined(__aarch64__)
#include "simd_neon.h"
#define TABLE kernels_neon
#define NAME "neon-dotprod"
#include "kernels.inc"
#endif
