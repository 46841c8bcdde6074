// One instruction set's kernels against a plain C++ twin of theirs, bit by bit. tests/ops/test_native_parity.py builds
// it with -DFAST=kernels_..., natively or for another machine, and runs it. Prints what differs; 0 where nothing does.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "halves.h"
#include "model.h"
#include "pack.h"

extern const Kernels FAST, kernels_twin;
const Kernels& kernels() { return kernels_twin; }

namespace {

std::mt19937 numbers(1);
int failures = 0, checks = 0;

std::vector<float> normal(size_t n, float scale = 1.0f) {
  std::normal_distribution<float> of(0.0f, scale);
  std::vector<float> x(n + 16);
  for (float& value : x) value = of(numbers);
  return x;
}

void same(const char* what, int detail, const void* a, const void* b, size_t bytes) {
  checks++;
  if (!memcmp(a, b, bytes)) return;
  failures++;
  printf("%s (%d) differs\n", what, detail);
}

// Bytes that are weights of this format: scales that are finite, and 7 bits where the format has no more.
void fill(Matrix& w, Arena& arena, int n, int k, int format) {
  lay_out(w, n, k, format);
  w.data = arena.allocate(w.panel_bytes * w.num_panels);
  for (int p = 0; p < w.num_panels; p++) {
    uint8_t* panel = w.data + p * w.panel_bytes;
    if (!is_quantized(format)) {
      for (int i = 0; i < k * kPanel; i++) {
        const float value = normal(1)[0];
        if (format == F32) ((float*)panel)[i] = value;
        else ((uint16_t*)panel)[i] = format == BF16 ? float_to_bf16(value) : float_to_f16(value);
      }
      continue;
    }
    const int scales = w.num_blocks * kPanel * (has_min(format) ? 2 : 1);
    for (int i = 0; i < scales; i++) ((uint16_t*)panel)[i] = float_to_f16(normal(1, 0.1f)[0]);
    for (size_t i = w.data_offset; i < w.panel_bytes; i++)
      panel[i] = (uint8_t)(numbers() & (format == U8M ? 127 : 255));
  }
}

void check_products() {
  for (int format = F32; format <= U8Z; format++)
    for (int rows : {1, 2, 3, 4, 5, 6, 9, 17, 65})
      for (bool wide : {false, true}) {
        if (wide && !is_quantized(format)) continue;
        Arena arena;
        Matrix w;
        fill(w, arena, 48, 96, format);
        const std::vector<float> x = normal((size_t)rows * 96);
        std::vector<float> out[2];
        int which = 0;
        for (const Kernels* k : {&FAST, &kernels_twin}) {
          ActivationBuffer a;
          a.reserve(rows, 96, is_quantized(format), wide);
          memcpy(a.x, x.data(), (size_t)rows * 96 * 4);
          if (is_quantized(format)) k->quantize(a, 0, rows, 0, a.x, a.stride, 96);
          out[which].assign((size_t)rows * 48, 0.0f);
          k->matmul(w, 0, 3, a, 0, rows, w.data, out[which++].data(), 48);
        }
        same("matmul", format * 1000 + rows * 2 + wide, out[0].data(), out[1].data(), out[0].size() * 4);
      }
}

void check_rows() {
  for (int n : {1, 16, 31, 64, 100}) {
    const std::vector<float> x = normal(n, 3.0f), y = normal(n);
    std::vector<float> a(n + 16), b(n + 16);
    const auto both = [&](const char* what, auto f) {
      a = b = x;
      f(FAST, a.data());
      f(kernels_twin, b.data());
      same(what, n, a.data(), b.data(), (size_t)n * 4);
    };
    both("rms_norm", [&](const Kernels& k, float* to) { k.rms_norm(x.data(), y.data(), 1e-5f, n, to); });
    both("silu_mul", [&](const Kernels& k, float* to) { k.silu_mul(x.data(), y.data(), n, 1, n, to, n); });
    if (n % 2 == 0) both("rope", [&](const Kernels& k, float* to) { k.rope(to, y.data(), y.data() + n / 2, n); });
    for (int format : {F32, BF16, F16})
      both("store_kv", [&](const Kernels& k, float* to) { k.store_kv(x.data(), 1, n, 0, false, to, 0, format); });
    if (n > 4)
      both("store_kv of bytes", [&](const Kernels& k, float* to) { k.store_kv(x.data(), 1, n, 0, false, to, 0, KV_I8); });
    std::vector<uint32_t> ids(n + 16);
    for (uint32_t& id : ids) id = numbers();
    both("keyed_gumbel", [&](const Kernels& k, float* to) { k.keyed_gumbel(ids.data(), n, 0x123456789abcdefull, to); });
    both("top_log_probs", [&](const Kernels& k, float* to) {
      int32_t found[4];
      const int most = n < 4 ? n : 4;
      k.top_log_probs(x.data(), n, most, found, to);
      for (int i = 0; i < most; i++) to[i] += (float)found[i];
    });
    const int first = FAST.argmax(x.data(), n), second = kernels_twin.argmax(x.data(), n);
    same("argmax", n, &first, &second, sizeof first);
    std::vector<float> least(n + 16);
    const int won = FAST.race(x.data(), ids.data(), n, 77, 0.7f, least.data());
    const int wins = kernels_twin.race(x.data(), ids.data(), n, 77, 0.7f, least.data());
    same("race", n, &won, &wins, sizeof won);
  }
}

size_t slot_bytes(int format, int dim) { return kv_slot_elements(format, 1, dim) * kv_element_bytes(format); }

void check_attention() {
  const int heads = 3, slots = 300, context = 130, nodes = 3;
  for (int dim : {64, 40})
    for (int format : {(int)F32, (int)BF16, (int)F16, KV_I8})
      for (int rows : {1, 3}) {
        const std::vector<float> q = normal((size_t)rows * heads * dim), wide = normal((size_t)2 * slots * dim);
        std::vector<uint8_t> cache((size_t)2 * slots * dim * 4 + 64);
        for (int i = 0; i < 2 * slots; i++)
          kernels_twin.store_kv(wide.data() + (size_t)i * dim, 1, dim, 0, false, cache.data(), i, format);
        const size_t half = slots * slot_bytes(format, dim);
        std::vector<int32_t> places(context), node_slots{290, 291, 292}, tail{290, 291, 292}, tail_nodes{0, 1, 2};
        for (int i = 0; i < context; i++) places[i] = (i * 7) % 280;
        std::vector<KeyList> lists(rows);
        for (int r = 0; r < rows; r++)  // a committed token, then nodes of a chain
          lists[r] = {places.data(), tail.data(), tail_nodes.data(), context, r % 2 ? 9 : 0, context + r};
        std::vector<float> out[2];
        int which = 0;
        for (const Kernels* k : {&FAST, &kernels_twin}) {
          out[which].assign((size_t)rows * heads * dim, 0.0f);
          std::vector<float> keys((size_t)kMostKeyBlocks * 16 * dim + 16), packed((size_t)rows * heads * dim + 16);
          std::vector<float> scores(attention_scores(rows, heads, context + nodes, nodes) + 16);
          k->attention({q.data(), lists.data(), out[which].data(), (size_t)heads * dim, (size_t)heads * dim, rows, heads,
                        node_slots.data(), nodes, dim, cache.data(), cache.data() + half, kv_slot_elements(format, 1, dim),
                        format, 0.125f, keys.data(), packed.data(), scores.data(), cache.data() + dim,
                        cache.data() + half + dim});
          which++;
        }
        same("attention", dim * 100 + format * 10 + rows, out[0].data(), out[1].data(), out[0].size() * 4);
      }
}

// Keys and values in 16-bit integers: a task as a whole, and in the steps that threads share.
void check_integer_attention() {
  const int heads = 3, slots = 57 * kTile, nodes = 3;
  for (int dim : {64, 48, 128})
    for (int context : {5, 64, 600})
      for (int rows : {1, 3, 9}) {
        const int row_floats = heads * dim, slot = (int)kv_slot_elements(KV_I16, 1, dim);
        const std::vector<float> q = normal((size_t)rows * row_floats, 2.0f), wide = normal((size_t)2 * slots * dim);
        std::vector<int16_t> caches[2];
        int which = 0;
        for (const Kernels* k : {&FAST, &kernels_twin}) {
          caches[which].assign((size_t)2 * slots * slot + 32, 0);
          for (int i = 0; i < 2 * slots; i++)
            k->store_kv(wide.data() + (size_t)i * dim, 1, dim, 0, i >= slots, caches[which].data(), i, KV_I16);
          which++;
        }
        same("store_kv of 16 bits", dim, caches[0].data(), caches[1].data(), caches[0].size() * 2);
        std::vector<int32_t> places(context), node_slots{890, 891, 892}, tail_nodes{0, 1, 2};
        for (int i = 0; i < context; i++) places[i] = i / kTile * 7 % 54 * kTile + i % kTile;
        std::vector<KeyList> lists(rows);
        for (int r = 0; r < rows; r++)  // rows that see ever more of the context, then nodes of a chain
          lists[r] = {places.data(), node_slots.data(), tail_nodes.data(), context, 0, context + r % 4};
        if (rows == 9) lists[4] = {places.data(), node_slots.data(), tail_nodes.data(), context - 3, 1, context - 3};
        std::vector<float> out[4];
        for (int i = 0; i < 4; i++) {
          const Kernels& k = i % 2 ? kernels_twin : FAST;
          out[i].assign((size_t)rows * row_floats, 7.0f);
          std::vector<float> keys((size_t)kMostKeyBlocks * 16 * dim + 16), packed((size_t)rows * row_floats + 16);
          std::vector<float> scores(attention_pair_scores(rows, heads, dim, context + nodes, nodes) + 16, NAN);
          const int16_t* cache = caches[0].data();
          const AttentionTask task{q.data(), lists.data(), out[i].data(), (size_t)row_floats, (size_t)row_floats, rows, heads,
                                   node_slots.data(), nodes, dim, cache, cache + (size_t)slots * slot, (size_t)slot, KV_I16,
                                   0.125f, keys.data(), packed.data(), scores.data()};
          if (i < 2) {
            k.attention(task);
            continue;
          }
          for (int from = 0; from < context; from += 256) k.score_positions(&task, 1, from, std::min(context, from + 256));
          for (int query = 0; query < rows * heads; query++) k.weigh(task, query);
          for (int from = 0; from < dim; from += 32) k.add_dimensions(&task, 1, from, std::min(dim, from + 32));
        }
        for (int i = 1; i < 4; i++)
          same("attention of 16 bits", dim * 10000 + context * 10 + rows, out[0].data(), out[i].data(), out[0].size() * 4);
      }
}

}  // namespace

int main() {
#if !defined(INTEGER_ATTENTION_ALONE)  // AVX-512 has a reciprocal of its own
  check_products();
  check_rows();
  check_attention();
#endif
  check_integer_attention();
  printf("%s: %d checks, %d differ\n", FAST.name, checks, failures);
  return failures ? 1 : 0;
}
