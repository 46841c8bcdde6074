// Keyed noise for the host's sampling code. paceline/ops/native/noise.py declares this interface again for ctypes.
#include "model.h"

extern "C" {

void pl_keyed_gumbel(const uint32_t* id_constants, int32_t n, uint64_t key, float* out) {
  kernels().keyed_gumbel(id_constants, n, key, out);
}
}
