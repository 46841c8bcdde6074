// Keyed noise for the host's sampling code. paceline/ops/native/noise.py declares this interface again for ctypes.
#include <vector>

#include "model.h"

extern "C" {

void pl_keyed_gumbel(const uint32_t* id_constants, int32_t n, uint64_t key, float* out) {
  kernels().keyed_gumbel(id_constants, n, key, out);
}

// The token that `race` draws, or -1 where it cannot tell.
int32_t pl_race(const float* logits, const uint32_t* id_constants, int32_t n, uint64_t key, float temperature) {
  try {
    thread_local std::vector<float> least;
    least.resize((n + kRaceBlock - 1) / kRaceBlock);
    return kernels().race(logits, id_constants, n, key, temperature, least.data());
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
}
