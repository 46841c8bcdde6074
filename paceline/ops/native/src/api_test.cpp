// Single kernels behind the C interface, so that tests can hold each against its plain twin.
#include <string.h>

#include <algorithm>
#include <vector>

#include "crowd.h"
#include "model.h"
#include "pack.h"

extern "C" {

void pl_test_crowd(int32_t threads, int32_t rows, const double* all_s, const double* fewer_s, const double* lost_share,
                   int32_t n, int32_t* used) {
  Crowd crowd;
  for (int i = 0; i < n; i++) {
    used[i] = crowd.fit(threads, rows);
    const double took = used[i] < threads ? fewer_s[i] : all_s[i];
    crowd.observe(used[i], threads, rows, took, took * lost_share[i]);
  }
}

int32_t pl_test_matmul(int32_t source, int32_t format, int32_t n, int32_t k, const void* w, int32_t rows,
                       int32_t wide, const float* x, float* out, float* unpacked) {
  Arena arena;
  Matrix matrix;
  if (!pack_matrix(matrix, arena, source, w, n, k, format, 1)) return PL_BAD_FORMAT;
  for (int row = 0; row < n; row++) unpack_row(matrix, row, unpacked + (size_t)row * k);
  ActivationBuffer a;
  a.reserve(rows, k, true, wide);
  for (int row = 0; row < rows; row++) {
    memcpy(a.x + (size_t)row * a.stride, x + (size_t)row * k, (size_t)k * 4);
  }
  kernels().quantize(a, 0, rows, 0, x, k, k);
  const int width = matrix.num_panels * kPanel;
  std::vector<float> padded((size_t)rows * width);
  kernels().matmul(matrix, 0, matrix.num_panels, a, 0, rows, nullptr, padded.data(), width);
  for (int row = 0; row < rows; row++)
    memcpy(out + (size_t)row * n, padded.data() + (size_t)row * width, (size_t)n * 4);
  return PL_OK;
}

void pl_test_rms_norm(const float* x, const float* weight, float eps, int32_t n, float* out) {
  kernels().rms_norm(x, weight, eps, n, out);
}
void pl_test_silu_mul(const float* gate, const float* up, int32_t n, float* out) {
  kernels().silu_mul(gate, up, n, 1, n, out, n);
}
void pl_test_rope(float* x, const float* cos, const float* sin, int32_t head_dim) {
  kernels().rope(x, cos, sin, head_dim);
}

void pl_test_attention(const float* q, const void* kv_layer, const int32_t* slots, const int32_t* cu_slots,
                       const int32_t* tails, int32_t rows, int32_t num_slots, int32_t heads, int32_t kv_heads,
                       int32_t head_dim, int32_t kv_format, int32_t window, float scale, float* out) {
  const int group = heads / kv_heads;
  const size_t element = kv_format == F32 ? 4 : 2, slot_stride = (size_t)kv_heads * head_dim;
  const uint8_t* key_cache = (const uint8_t*)kv_layer;
  const uint8_t* values = key_cache + num_slots * slot_stride * element;
  for (int row = 0; row < rows; row++) {
    const int32_t* own = slots + cu_slots[row];
    const int length = cu_slots[row + 1] - cu_slots[row], context = length - tails[row];
    std::vector<int32_t> places(tails[row]);
    for (int i = 0; i < tails[row]; i++) places[i] = i;
    const KeyList list{own, own + context, places.data(), context, window ? std::max(0, length - window) : 0, length};
    std::vector<float> keys((size_t)kMostKeyBlocks * 16 * head_dim), packed((size_t)group * head_dim);
    std::vector<float> scores(attention_scores(1, group, length, tails[row]));
    for (int head = 0; head < kv_heads; head++) {
      const size_t at = ((size_t)row * heads + (size_t)head * group) * head_dim;
      const size_t offset = (size_t)head * head_dim * element;
      kernels().attention({q + at, &list, out + at, 0, 0, 1, group, own + context, tails[row], head_dim,
                           key_cache + offset, values + offset, slot_stride, kv_format, scale, keys.data(), packed.data(),
                           scores.data()});
    }
  }
}
}
