// Where the time of a quantized product goes; paceline/ops/native/profile.py declares this interface again for ctypes.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "model.h"
#include "pack.h"

namespace {

constexpr int kStages = SUMS + 1, kBareBlocks = 1000;

template <typename F>
double seconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Weights and rows without meaning: the time does not depend on them.
void fill(Matrix& w, Arena& arena, ActivationBuffer& x, int format, int k, int rows) {
  lay_out(w, 2 * kPanel, k, format);
  w.data = arena.allocate(w.panel_bytes * w.num_panels);
  memset(w.data, 0x21, w.panel_bytes * w.num_panels);
  x.reserve(rows, k, true);
  for (int i = 0; i < rows * x.stride; i++) x.x[i] = (float)(i % 37 - 18);
  kernels().quantize(x, 0, rows, 0, x.x, x.stride, k);
}

}  // namespace

extern "C" {

// The least seconds seen, within `limit_s` on one thread, for 16 outputs x 32 k of one row: best[0] the product as it
// runs, best[1] its dot products alone, best[2 + stage] without a stage of kernels.h (0: none left out). Weights and
// rows come from the caches. Negative: that stage cannot be taken apart here.
int32_t pl_profile_product(int32_t format, int32_t k, int32_t rows, double limit_s, double* best) {
  if (!is_quantized(format) || k < 1 || rows < 1) return PL_BAD_FORMAT;
  try {
    Arena arena;
    Matrix w;
    ActivationBuffer x;
    fill(w, arena, x, format, k, rows);
    std::vector<float> out((size_t)rows * 2 * kPanel);
    const double blocks = 2.0 * rows * w.num_blocks;
    std::fill(best, best + 2 + kStages, INFINITY);
    for (double spent = 0.0; spent < limit_s;) {  // variants take turns, so that a slow moment hits all of them
      double took = seconds([&] { kernels().matmul(w, 0, 2, x, 0, rows, nullptr, out.data(), 2 * kPanel); });
      best[0] = std::min(best[0], took / blocks);
      spent += took;
      took = seconds([&] { kernels().bare_dots(kBareBlocks); });
      best[1] = std::min(best[1], took / kBareBlocks);
      for (int stage = 0; stage < kStages; stage++) {
        bool known = false;
        took = seconds([&] { known = kernels().sweep_without(stage, w, x, rows, out.data()); });
        best[2 + stage] = known ? std::min(best[2 + stage], took / blocks) : -1.0;
        spent += took;
      }
    }
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}
}
