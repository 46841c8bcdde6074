#include "api.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "model.h"
#include "pack.h"
#include "pool.h"

namespace {

// Best first; some may be null.
const Kernels* const kAllKernels[] = {
#if defined(__x86_64__)
    &kernels_avx512, kernels_avxvnni_or_null, &kernels_avx2,
#elif defined(__aarch64__)
    kernels_neon_i8mm_or_null, &kernels_neon,
#endif
    &kernels_portable};

#if defined(__x86_64__)
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#elif defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return true;  // Apple's processors
#endif
}

bool has_matrix_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) >> 13 & 1;  // HWCAP2_I8MM
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) && has;
#else
  return false;
#endif
}
#endif

bool machine_has(const Kernels* k) {
  if (!k) return false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (k == &kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (k == kernels_avxvnni_or_null) return avx2 && has_avx_vnni();
  if (k == &kernels_avx2) return avx2;
#elif defined(__aarch64__)
  if (k == kernels_neon_i8mm_or_null) return has_dot_products() && has_matrix_products();
  if (k == &kernels_neon) return has_dot_products();
#endif
  return k == &kernels_portable;
}

const Kernels* best_kernels() {
  for (const Kernels* k : kAllKernels)
    if (machine_has(k)) return k;
  return &kernels_portable;
}

const Kernels*& current() {
  static const Kernels* chosen = best_kernels();
  return chosen;
}

Matrix* find_matrix(PlModel& m, int part, int layer) {
  if (part == PL_EMBED) return &m.embed;
  if (part == PL_HEAD) return &m.head;
  if (layer < 0 || layer >= m.config.num_layers) return nullptr;
  Layer& l = m.layers[layer];
  switch (part) {
    case PL_Q: return &l.q;
    case PL_K: return &l.k;
    case PL_V: return &l.v;
    case PL_O: return &l.o;
    case PL_GATE: return &l.gate;
    case PL_UP: return &l.up;
    case PL_DOWN: return &l.down;
    default: return nullptr;
  }
}

const float** find_vector(PlModel& m, int part, int layer) {
  if (part == PL_FINAL_NORM) return &m.final_norm;
  if (layer < 0 || layer >= m.config.num_layers) return nullptr;
  Layer& l = m.layers[layer];
  switch (part) {
    case PL_INPUT_NORM: return &l.input_norm;
    case PL_POST_NORM: return &l.post_norm;
    case PL_Q_NORM: return &l.q_norm;
    case PL_K_NORM: return &l.k_norm;
    default: return nullptr;
  }
}

float* copy_floats(PlModel& m, const float* data, int n, int padded) {
  float* to = (float*)m.arena.allocate((size_t)padded * 4);
  memcpy(to, data, (size_t)n * 4);
  return to;
}

bool is_complete(const PlModel& m) {
  if (!m.embed.data || !m.head.data || !m.final_norm) return false;
  return std::all_of(m.layers.begin(), m.layers.end(), [](const Layer& l) {
    return l.q.data && l.k.data && l.v.data && l.o.data && l.gate.data && l.up.data && l.down.data && l.input_norm &&
           l.post_norm;
  });
}

// A wrong index here would be a wild read there.
int check_batch(const PlModel& m, const PlBatch& b) {
  if (m.config.kv_format == KV_I16 && (b.num_slots % kTile || b.block_size % kTile)) return PL_BAD_TILES;
  for (int r = 0; r < b.num_requests; r++)
    if (b.cu_query[r] > b.cu_query[r + 1]) return PL_BAD_ROW;
  if (b.num_requests && (b.cu_query[0] != 0 || b.cu_query[b.num_requests] != b.num_rows)) return PL_BAD_ROW;
  for (int row = 0; row < b.num_rows; row++) {
    const int r = b.req_ids[row];
    if (b.token_ids[row] < 0 || b.token_ids[row] >= m.config.vocab_size) return PL_BAD_TOKEN;
    if (r < 0 || r >= b.num_requests || row < b.cu_query[r] || row >= b.cu_query[r + 1]) return PL_BAD_ROW;
    if (b.parents[row] >= row || (b.parents[row] >= 0 && b.parents[row] < b.cu_query[r])) return PL_BAD_ROW;
    if (b.parents[row] >= 0 && !b.is_node[b.parents[row]]) return PL_BAD_ROW;
    if (b.context_lens[row] < 0 || (!b.is_node[row] && b.context_lens[row] < 1)) return PL_BAD_ROW;
    if (b.slot_mapping[row] < 0 || b.slot_mapping[row] >= b.num_slots) return PL_BAD_SLOT;
    if (b.context_lens[row] > (int64_t)b.max_blocks * b.block_size) return PL_BAD_SLOT;
    const int used = (b.context_lens[row] + b.block_size - 1) / b.block_size;
    const bool longest_so_far = row == b.cu_query[r] || b.context_lens[row] > b.context_lens[row - 1];
    for (int i = 0; longest_so_far && i < used; i++) {
      const int64_t block = b.block_tables[(size_t)r * b.max_blocks + i];
      if (block < 0 || (block + 1) * b.block_size > b.num_slots) return PL_BAD_SLOT;
    }
  }
  for (int i = 0; i < b.num_logits; i++)
    if (b.logits_rows[i] < 0 || b.logits_rows[i] >= b.num_rows) return PL_BAD_ROW;
  return PL_OK;
}

}  // namespace

const Kernels& kernels() { return *current(); }

extern "C" {

PlModel* pl_model_new(const PlConfig* config) {
  if (config->num_heads > kTaskQueries * config->num_kv_heads) return nullptr;
  try {
    PlModel* m = new PlModel;
    m->config = *config;
    m->inv_freq.assign(config->inv_freq, config->inv_freq + config->head_dim / 2);
    m->layers.resize(config->num_layers);
    for (int i = 0; i < config->num_layers; i++) {
      m->layers[i].window = config->windows[i];
      m->layers[i].rotates = config->rotates[i] != 0;
    }
    return m;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_model_free(PlModel* model) { delete model; }

int32_t pl_model_set_matrix(PlModel* model, int32_t part, int32_t layer, int32_t source, int32_t format, int32_t n,
                            int32_t k, const void* data, const float* bias) {
  Matrix* to = find_matrix(*model, part, layer);
  if (!to) return PL_BAD_ROW;
  try {
    if (!pack_matrix(*to, model->arena, source, data, n, k, format, model->config.num_threads)) return PL_BAD_FORMAT;
    to->bias = bias ? copy_floats(*model, bias, n, to->num_panels * kPanel) : nullptr;
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  model->any_quantized |= is_quantized(format);
  return PL_OK;
}

int32_t pl_model_map_matrix(PlModel* model, int32_t part, int32_t layer, int32_t format, int32_t n, int32_t k,
                            const void* data, const float* bias) {
  Matrix* to = find_matrix(*model, part, layer);
  if (!to) return PL_BAD_ROW;
  lay_out(*to, n, k, format);
  to->data = (uint8_t*)data;  // read only
  model->mapped_bytes += to->panel_bytes * to->num_panels;
  model->any_quantized |= is_quantized(format);
  try {
    to->bias = bias ? copy_floats(*model, bias, n, to->num_panels * kPanel) : nullptr;
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

int32_t pl_model_packed(PlModel* model, int32_t part, int32_t layer, PlPacked* out) {
  const Matrix* w = find_matrix(*model, part, layer);
  if (!w || !w->data) return PL_BAD_ROW;
  *out = {w->format, w->n, w->k, (int64_t)(w->panel_bytes * w->num_panels), w->data, w->bias};
  return PL_OK;
}

int32_t pl_model_set_vector(PlModel* model, int32_t part, int32_t layer, int32_t n, const float* data) {
  const float** to = find_vector(*model, part, layer);
  if (!to) return PL_BAD_ROW;
  try {
    *to = copy_floats(*model, data, n, round_up(n, kPanel));
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

void pl_model_tie_head(PlModel* model) { model->head = model->embed; }
int64_t pl_model_weight_bytes(const PlModel* model) {
  const Matrix& embed = model->embed;
  const bool tied = model->head.data == embed.data;
  return (int64_t)(model->arena.total() + model->mapped_bytes - (tied ? 0 : embed.panel_bytes * embed.num_panels));
}
void pl_model_profile(PlModel* model, double* to) { model->profile = to; }
void pl_model_set_threads(PlModel* model, int32_t num_threads) { model->config.num_threads = num_threads; }
int32_t pl_natural_format(int32_t source) { return natural_format(source); }

int32_t pl_forward(PlModel* model, const PlBatch* batch) {
  if (!is_complete(*model)) return PL_INCOMPLETE;
  if (const int status = check_batch(*model, *batch)) return status;
  if (!batch->num_rows) return PL_OK;
  try {
    run_pass(*model, *batch);
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

int32_t pl_move_slots(void* kv_cache, int32_t layers, int64_t num_slots, int32_t kv_heads, int32_t head_dim, int32_t n,
                      const int64_t* sources, const int64_t* targets) {
  if (num_slots % kTile) return PL_BAD_TILES;
  for (int i = 0; i < n; i++)
    if (std::min(sources[i], targets[i]) < 0 || std::max(sources[i], targets[i]) >= num_slots) return PL_BAD_SLOT;
  const size_t head_size = kTile * (size_t)(head_dim + 2), tile_size = kv_heads * head_size;
  std::vector<int16_t> held;
  try {
    held.resize((size_t)n * (head_dim + 2));
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  for (int64_t part = 0; part < 2 * (int64_t)layers * kv_heads; part++) {
    const bool is_value = part / kv_heads % 2;
    int16_t* heads = (int16_t*)kv_cache + part / kv_heads * num_slots * kv_heads * (head_dim + 2) + part % kv_heads * head_size;
    const auto each = [&](int64_t slot, auto f) {  // of the pairs of a slot's head, or of its single numbers, and its scale
      int16_t* tile = heads + slot / kTile * tile_size;
      const int lane = (int)(slot % kTile);
      if (is_value)
        for (int d = 0; d < head_dim; d++) f(tile + (size_t)(lane / 2) * 2 * head_dim + 2 * d + lane % 2, d, 1);
      else
        for (int d = 0; d < head_dim; d += 2) f(tile + (size_t)d * kTile + 2 * lane, d, 2);
      f(tile + (size_t)head_dim * kTile + 2 * lane, head_dim, 2);
    };
    for (int i = 0; i < n; i++)
      each(sources[i], [&](const int16_t* at, int place, int size) {
        memcpy(held.data() + (size_t)i * (head_dim + 2) + place, at, 2 * size);
      });
    for (int i = 0; i < n; i++)
      each(targets[i], [&](int16_t* at, int place, int size) {
        memcpy(at, held.data() + (size_t)i * (head_dim + 2) + place, 2 * size);
      });
  }
  return PL_OK;
}

const char* pl_instruction_set(void) { return current()->name; }

int32_t pl_select_instruction_set(const char* name) {
  for (const Kernels* k : kAllKernels)
    if (machine_has(k) && !strcmp(k->name, name)) {
      current() = k;
      return PL_OK;
    }
  return PL_BAD_FORMAT;
}

double pl_measure_bandwidth(int64_t bytes, int32_t num_threads, int32_t repeats) {
  Arena arena;
  const size_t each = (size_t)bytes / num_threads / 4096 * 4096;
  std::vector<float*> parts;
  for (int i = 0; i < num_threads; i++) parts.push_back((float*)arena.allocate(each));
  for (float* part : parts) memset(part, 1, each);
  std::vector<float> sums(num_threads * 16);
  double best = 0.0;
  for (int i = 0; i < repeats; i++) {
    const auto start = std::chrono::steady_clock::now();
    team().run(num_threads, [&](int thread) { sums[thread * 16] = kernels().read(parts[thread], each / 4); });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::max(best, (double)(each * num_threads) / elapsed.count());
  }
  return best;
}

void pl_set_waiting(int32_t how) { team().set_waiting(how); }
int32_t pl_last_threads(void) { return team().last_size(); }

void pl_argmax(const float* x, int32_t rows, int32_t n, int64_t stride, int32_t num_threads, int32_t* out) {
  std::atomic<int> next{0};
  team().run(std::min(num_threads, std::max(rows, 1)), [&](int) {
    for (int row = next++; row < rows; row = next++) out[row] = kernels().argmax(x + (size_t)row * stride, n);
  });
}
}
