// A decoder layer of a drafter, run by every thread of the team together.
//
// A drafter's layer is a decoder layer but for what goes in: EAGLE-3's attention reads two vectors side by side, DFlash
// adds keys that belong to no row of the block. So the caller hands over the attention's input, the residual stream and
// the slots of each row's keys; nothing here knows which network it is.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "model.h"
#include "pool.h"

extern "C" {
struct PlLayerBatch {
  int32_t num_rows, layer, store_only;  // store_only: keys and values, no more
  int64_t num_slots;
  const int32_t *positions, *slots;                 // [rows]
  const int32_t *key_begins, *context_lens;         // [rows]: the row's context is key_slots[begin .. begin + len)
  const int32_t *tail_begins, *tail_lens;           // [rows]: then tail_slots[begin .. begin + len)
  const int32_t *key_slots, *tail_slots;
  const float* input;  // [rows][inputs of q, k and v]
  float* stream;       // [rows][hidden_size], updated
  void* kv_cache;      // [layers][2][slots][kv heads][head_dim], float32
};
}

namespace {

constexpr int kRows = 64;           // rows of a product that wait in scratch for what follows it
constexpr int kAttentionRows = 16;  // rows that share one reading of the keys
constexpr int kTaskNodes = 64;      // tail slots that are scored for all rows of a task
constexpr int kGroup = 2;           // panels that are multiplied together

int num_groups(const Matrix& w) { return (w.num_panels + kGroup - 1) / kGroup; }

void quantize_row(const Activations& a, int row, int n) {
  kernels().quantize(a, row, 1, 0, a.x + (size_t)row * a.stride, 0, n);
}

const uint8_t* group_data(const Matrix& w, int group) { return w.data + (size_t)group * kGroup * w.panel_bytes; }

// One thread's part of every step: of n units it does [begin(n), end(n)).
struct Share {
  int thread, threads;
  int begin(int n) const { return (int)((int64_t)n * thread / threads); }
  int end(int n) const { return (int)((int64_t)n * (thread + 1) / threads); }
  // Calls f(i) for this thread's units, then waits for the others.
  template <typename F>
  void deal(int n, F f) const {
    for (int i = begin(n); i < end(n); i++) f(i);
    team().barrier();
  }
  // Weights that this thread reads after group i of w: they are fetched while that one is multiplied.
  const uint8_t* after(const Matrix& w, int i, const Matrix* then) const {
    if (i + 1 < end(num_groups(w))) return group_data(w, i + 1);
    return then && begin(num_groups(*then)) < end(num_groups(*then)) ? group_data(*then, begin(num_groups(*then)))
                                                                     : nullptr;
  }
};

// out[row][..] = w * x[row] (+ bias) for one group of panels; columns past w.n are not written.
void multiply(const Matrix& w, int group, const Activations& x, int rows, const void* next, float* scratch, float* out,
              size_t stride) {
  const int panel = group * kGroup, panels = std::min(kGroup, w.num_panels - panel), width = kGroup * kPanel;
  const int columns = std::min(width, w.n - panel * kPanel);
  for (int row = 0; row < rows; row += kRows) {
    const int count = std::min(kRows, rows - row);
    kernels().matmul(w, panel, panels, x, row, count, row ? nullptr : next, scratch, width);
    for (int r = 0; r < count; r++) {
      float* to = out + (size_t)(row + r) * stride + panel * kPanel;
      const float* from = scratch + r * width;
      for (int j = 0; j < columns; j++) to[j] = w.bias ? from[j] + w.bias[panel * kPanel + j] : from[j];
    }
  }
}

}  // namespace

struct PlMatrix {
  Matrix matrix;
  Arena arena;
  ActivationBuffer input;
  Buffer<float> scratch;
};

struct PlLayers : PlModel {
  ActivationBuffer input;
};

namespace {

struct AttentionItem {
  int row, rows, kv_head;
  int first_node, num_nodes;  // the stretch of tail_slots in which the rows' tails lie
};

struct LayerPass {
  PlLayers& m;
  const PlLayerBatch& b;
  const Layer& layer;
  const Matrix* then;  // what is read after this layer, or null
  int threads;
  std::vector<KeyList> lists;
  std::vector<AttentionItem> items;
  std::vector<int32_t> places;  // 0, 1, 2, ...: a tail among its task's nodes
  size_t scratch_floats = (size_t)2 * kRows * kGroup * kPanel, packed_floats = 0;

  LayerPass(PlLayers& model, const PlLayerBatch& batch, int num_threads, const Matrix* after = nullptr)
      : m(model),
        b(batch),
        layer(model.layers[batch.layer]),
        then(after),
        threads(num_threads) {
    const PlConfig& c = m.config;
    if (!b.store_only) plan_attention();
    m.input.reserve(b.num_rows, layer.q.k, m.any_quantized);
    m.qkv.reserve((size_t)b.num_rows * m.qkv_size());
    m.normed.reserve(b.num_rows, c.hidden_size, m.any_quantized);
    m.attended.reserve(b.num_rows, m.q_size(), m.any_quantized);
    m.activated.reserve(b.num_rows, c.intermediate_size, m.any_quantized);
    m.scratch.reserve(scratch_floats * threads);
  }

  void plan_attention() {
    const PlConfig& c = m.config;
    int longest = 0;
    for (int row = 0; row < b.num_rows; row++) {
      const int length = b.context_lens[row] + b.tail_lens[row];
      lists.push_back({b.key_slots + b.key_begins[row], b.tail_slots + b.tail_begins[row], nullptr, b.context_lens[row],
                       0, length});
      longest = std::max(longest, length);
    }
    const int most = std::clamp(kTaskQueries / (c.num_heads / c.num_kv_heads), 1, kAttentionRows);
    const int tile = std::clamp(b.num_rows * c.num_kv_heads / (threads * 4), 1, most);
    int most_nodes = 0;
    for (int row = 0; row < b.num_rows;) {
      const int first = row;  // rows of one request, which share their context's slots, with tails that lie close together
      int low = b.tail_begins[row], high = low + b.tail_lens[row];
      for (row++; row - first < tile && row < b.num_rows && b.key_begins[row] == b.key_begins[first]; row++) {
        const int begin = std::min(low, b.tail_begins[row]), end = std::max(high, b.tail_begins[row] + b.tail_lens[row]);
        if (end - begin > kTaskNodes) break;
        low = begin, high = end;
      }
      for (int head = 0; head < c.num_kv_heads; head++) items.push_back({first, row - first, head, low, high - low});
      most_nodes = std::max(most_nodes, high - low);
    }
    places.resize(most_nodes);
    for (int i = 0; i < most_nodes; i++) places[i] = i;
    for (const AttentionItem& item : items)
      for (int row = item.row; row < item.row + item.rows; row++)
        lists[row].tail_nodes = places.data() + (b.tail_begins[row] - item.first_node);
    const int heads = c.num_heads / c.num_kv_heads;
    packed_floats = (size_t)tile * heads * c.head_dim;
    const size_t wanted = keys_floats() + packed_floats + attention_scores(tile, heads, longest, most_nodes);
    scratch_floats = (std::max(scratch_floats, wanted) + 31) / 16 * 16;
  }

  size_t keys_floats() const { return (size_t)kMostKeyBlocks * 16 * m.config.head_dim; }

  float* kv(int which) const {
    return (float*)b.kv_cache + ((size_t)b.layer * 2 + which) * b.num_slots * m.kv_size();
  }

  void run(int thread) {
    float* scratch = m.scratch.get() + (size_t)thread * scratch_floats;
    const Share s{thread, threads};
    s.deal(b.num_rows, [&](int row) {
      memcpy(m.input.x + (size_t)row * m.input.stride, b.input + (size_t)row * layer.q.k, (size_t)layer.q.k * 4);
      if (m.any_quantized) quantize_row(m.input, row, layer.q.k);
    });
    project(s, scratch);
    s.deal(b.num_rows, [&](int row) { rotate_and_store(row); });
    if (b.store_only) return;
    s.deal((int)items.size(), [&](int i) { attend(items[i], scratch); });
    if (m.any_quantized) s.deal(b.num_rows, [&](int row) { quantize_row(m.attended, row, m.q_size()); });
    add_product(s, layer.o, m.attended, &layer.gate, scratch);
    s.deal(b.num_rows, [&](int row) {
      float* to = m.normed.x + (size_t)row * m.normed.stride;
      const PlConfig& c = m.config;
      kernels().rms_norm(b.stream + (size_t)row * c.hidden_size, layer.post_norm, c.rms_norm_eps, c.hidden_size, to);
      if (m.any_quantized) quantize_row(m.normed, row, c.hidden_size);
    });
    gate_up(s, scratch);
    if (m.any_quantized)
      s.deal(b.num_rows, [&](int row) { quantize_row(m.activated, row, m.config.intermediate_size); });
    add_product(s, layer.down, m.activated, then, scratch);
  }

  void project(const Share& s, float* scratch) {
    const int q = b.store_only ? 0 : num_groups(layer.q), k = num_groups(layer.k), v = num_groups(layer.v);
    const auto data = [&](int i) {
      return i < q ? group_data(layer.q, i) : i < q + k ? group_data(layer.k, i - q) : group_data(layer.v, i - q - k);
    };
    s.deal(q + k + v, [&](int i) {
      const bool is_q = i < q, is_k = !is_q && i < q + k;
      const Matrix& w = is_q ? layer.q : is_k ? layer.k : layer.v;
      const int column = is_q ? 0 : is_k ? m.k_begin() : m.v_begin();
      const void* next = i + 1 < s.end(q + k + v) ? data(i + 1) : nullptr;
      multiply(w, is_q ? i : is_k ? i - q : i - q - k, m.input, b.num_rows, next, scratch, m.qkv.get() + column,
               m.qkv_size());
    });
  }

  void rotate_and_store(int row) {
    const PlConfig& c = m.config;
    const int dim = c.head_dim, half = dim / 2;
    float cos[512], sin[512];
    for (int i = 0; i < half; i++) {
      const float angle = (float)b.positions[row] * m.inv_freq[i];
      cos[i] = cosf(angle) * c.rope_scale;
      sin[i] = sinf(angle) * c.rope_scale;
    }
    float* qkv = m.qkv.get() + (size_t)row * m.qkv_size();
    for (int h = b.store_only ? c.num_heads : 0; h < c.num_heads + c.num_kv_heads; h++) {
      const bool is_key = h >= c.num_heads;
      float* head = is_key ? qkv + m.k_begin() + (h - c.num_heads) * dim : qkv + h * dim;
      const float* norm = is_key ? layer.k_norm : layer.q_norm;
      if (norm) kernels().rms_norm(head, norm, c.rms_norm_eps, dim, head);
      kernels().rope(head, cos, sin, dim);
    }
    const size_t at = (size_t)b.slots[row] * m.kv_size();
    memcpy(kv(0) + at, qkv + m.k_begin(), (size_t)m.kv_size() * 4);
    memcpy(kv(1) + at, qkv + m.v_begin(), (size_t)m.kv_size() * 4);
  }

  void attend(const AttentionItem& item, float* scratch) {
    const PlConfig& c = m.config;
    const int heads = c.num_heads / c.num_kv_heads, column = item.kv_head * heads * c.head_dim;
    const size_t head = (size_t)item.kv_head * c.head_dim;
    kernels().attention({m.qkv.get() + (size_t)item.row * m.qkv_size() + column, lists.data() + item.row,
                         m.attended.x + (size_t)item.row * m.attended.stride + column, (size_t)m.qkv_size(),
                         (size_t)m.attended.stride, item.rows, heads, b.tail_slots + item.first_node,
                         item.num_nodes, c.head_dim, kv(0) + head, kv(1) + head,
                         (size_t)m.kv_size(), F32, 1.0f / sqrtf((float)c.head_dim), scratch,
                         scratch + keys_floats(), scratch + keys_floats() + packed_floats});
  }

  void add_product(const Share& s, const Matrix& w, const Activations& x, const Matrix* after, float* scratch) {
    const int width = kGroup * kPanel;
    s.deal(num_groups(w), [&](int i) {
      const int panel = i * kGroup, panels = std::min(kGroup, w.num_panels - panel);
      const int columns = std::min(width, w.n - panel * kPanel);
      for (int row = 0; row < b.num_rows; row += kRows) {
        const int count = std::min(kRows, b.num_rows - row);
        kernels().matmul(w, panel, panels, x, row, count, row ? nullptr : s.after(w, i, after), scratch, width);
        for (int r = 0; r < count; r++) {
          float* to = b.stream + (size_t)(row + r) * m.config.hidden_size + panel * kPanel;
          for (int j = 0; j < columns; j++)
            to[j] += scratch[r * width + j] + (w.bias ? w.bias[panel * kPanel + j] : 0.0f);
        }
      }
    });
  }

  void gate_up(const Share& s, float* scratch) {
    const int width = kGroup * kPanel;
    float *gate = scratch, *up = scratch + kRows * width;
    s.deal(num_groups(layer.gate), [&](int i) {
      const int panel = i * kGroup, panels = std::min(kGroup, layer.gate.num_panels - panel);
      const int columns = std::min(width, layer.gate.n - panel * kPanel);
      for (int row = 0; row < b.num_rows; row += kRows) {
        const int count = std::min(kRows, b.num_rows - row);
        const void* next = row ? nullptr : group_data(layer.up, i);
        kernels().matmul(layer.gate, panel, panels, m.normed, row, count, next, gate, width);
        next = row ? nullptr : i + 1 < s.end(num_groups(layer.gate)) ? s.after(layer.gate, i, nullptr)
                                                                     : s.after(layer.up, i, &layer.down);
        kernels().matmul(layer.up, panel, panels, m.normed, row, count, next, up, width);
        for (int r = 0; r < count; r++) {
          for (int j = 0; j < columns; j++) {
            if (layer.gate.bias) gate[r * width + j] += layer.gate.bias[panel * kPanel + j];
            if (layer.up.bias) up[r * width + j] += layer.up.bias[panel * kPanel + j];
          }
        }
        kernels().silu_mul(gate, up, width, count, columns,
                           m.activated.x + (size_t)row * m.activated.stride + panel * kPanel, m.activated.stride);
      }
    });
  }
};

bool in_range(const int32_t* slots, int begin, int count, int64_t num_slots) {
  for (int i = begin; i < begin + count; i++)
    if (slots[i] < 0 || slots[i] >= num_slots) return false;
  return true;
}

// A wrong index here would be a wild read there.
int check_rows(const PlLayers& m, const PlLayerBatch& b) {
  if (b.layer < 0 || b.layer >= m.config.num_layers || m.config.head_dim > 1024) return PL_BAD_ROW;
  const Layer& l = m.layers[b.layer];
  if (!l.q.data || !l.k.data || !l.v.data || !l.o.data || !l.gate.data || !l.up.data || !l.down.data || !l.post_norm)
    return PL_INCOMPLETE;
  for (int row = 0; row < b.num_rows; row++) {
    if (b.slots[row] < 0 || b.slots[row] >= b.num_slots) return PL_BAD_SLOT;
    if (b.store_only) continue;
    if (b.context_lens[row] + b.tail_lens[row] < 1) return PL_BAD_ROW;
    const bool new_context = row == 0 || b.key_begins[row] != b.key_begins[row - 1] ||
                             b.context_lens[row] > b.context_lens[row - 1];
    if (new_context && !in_range(b.key_slots, b.key_begins[row], b.context_lens[row], b.num_slots)) return PL_BAD_SLOT;
    if (!in_range(b.tail_slots, b.tail_begins[row], b.tail_lens[row], b.num_slots)) return PL_BAD_SLOT;
  }
  return PL_OK;
}

}  // namespace
