// Built with the compiler's default flags for the machine.
#include "simd_portable.h"
#define TABLE kernels_portable
#define NAME "portable"
#include "kernels.inc"
