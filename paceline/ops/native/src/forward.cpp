// One pass over all layers, run by every thread of the team: each step deals its work out, then all meet.
//
// A step's work is a range of units (a row, a group of two panels, an attention task). Every thread has a home stretch of
// it and helps others when done. Home stretches make the order of memory known in advance, so that each product
// can ask for the weights that come after it, across the end of the step too.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "model.h"
#include "pack.h"
#include "pool.h"

namespace {

constexpr int kRowTile = 64;      // rows of a product that wait in scratch for what follows it
constexpr int kAttentionRows = 16;  // rows that share one reading of the keys
constexpr int kSpreadRows = 4;      // rows of a request up to which threads share the reading of its keys ...
constexpr int kSpreadFrom = 512;    // ... from this many on: below, meeting three times more costs what it brings
constexpr int kChunk = 256;         // positions whose scores are one unit of work
constexpr int kGroup = 2;           // panels that are multiplied together: 32 outputs, one block of what comes after

int num_groups(const Matrix& w) { return (w.num_panels + kGroup - 1) / kGroup; }
const uint8_t* group_data(const Matrix& w, int group) { return w.data + (size_t)group * kGroup * w.panel_bytes; }

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct AttentionItem {
  int row, rows, kv_head;
  int first_node, num_nodes;  // the rows' ancestors are among these rows of the pass
};

// A request's attention shared by all threads, over its context rather than over its heads.
struct SpreadItem {
  int row = 0, rows = 0, first_node = 0, num_nodes = 0;
  size_t scores = 0;  // where its first head's begin; the other heads' follow
  size_t head_scores = 0;
};
struct SpreadChunk {
  int item, from, to;  // positions
};

class Pass {
 public:
  Pass(PlModel& model, const PlBatch& batch)
      : m_(model), c_(model.config), b_(batch), k_(kernels()), threads_(std::max(1, model.config.num_threads)) {
    taken_ = std::vector<Taken>(2 * (size_t)threads_);
    build_key_lists();
    build_attention_items();
    build_spread();
    reserve();
  }

  void run() {
    team().run(threads_, [this](int thread) { Worker{*this, thread, team()}.run(); });
  }

 private:
  // How many units of a thread's home stretch are taken, in this step or the next.
  struct alignas(64) Taken {
    std::atomic<int> count{0};
  };

  // A thread's view: where it is in the sequence of steps, and its scratch.
  struct Worker {
    Pass& p;
    int thread;
    Team& team;
    int step = 0;

    int home(int n, int of) const { return (int)((int64_t)n * of / p.threads_); }
    int home_begin(int n) const { return home(n, thread); }
    bool is_last_at_home(int i, int n) const { return i == home(n, thread + 1) - 1; }

    // Calls f(i) for every i in [0, n), on whichever thread; gives back when all are done.
    template <typename F>
    void share(PlStep what, int n, F f) {
      double* profile = p.m_.profile ? p.m_.profile + ((size_t)thread * PL_STEPS + what) * 2 : nullptr;
      const double started = profile ? seconds() : 0.0;
      Taken* now = &p.taken_[(step % 2) * p.threads_];
      // No thread is in the next step before the barrier below, nor in the last one since the barrier above.
      p.taken_[((step + 1) % 2) * p.threads_ + thread].count.store(0, std::memory_order_relaxed);
      for (int turn = 0; turn < p.threads_; turn++) {
        const int whose = (thread + turn) % p.threads_, end = home(n, whose + 1);
        for (;;) {
          const int i = home(n, whose) + now[whose].count.fetch_add(1, std::memory_order_relaxed);
          if (i >= end) break;
          f(i);
        }
      }
      step++;
      const double worked = profile ? seconds() : 0.0;
      team.barrier();
      if (!profile) return;
      profile[0] += worked - started;
      profile[1] += seconds() - worked;
    }
    float* scratch() const { return p.m_.scratch.get() + (size_t)thread * p.scratch_floats_; }

    void run();
    void embed();
    void layer(int index, const void* after);
    void capture(int id);
    void norm_rows(const float* weight, const int32_t* rows, int n, bool wide = false);
    void project_qkv(const Layer& layer, const void* after);
    void rotate_and_store(const Layer& layer, int index);
    void attend(const Layer& layer, int index);
    void attend_spread(int index);
    std::vector<AttentionTask> spread_tasks(const SpreadItem& item, int index) const;
    void project_add(PlStep what, const Matrix& w, const Activations& x, const void* after);
    void gate_up(const Layer& layer, const void* after);
    void logits();

    // Where this thread begins to read when it comes to this matrix, or this layer.
    const void* start_of(const Matrix& w) const { return group_data(w, home_begin(num_groups(w))); }
    const void* start_of(const Layer& layer) const;
  };

  void build_key_lists();
  int attention_tile() const;
  void build_attention_items();
  void build_spread();
  void reserve();
  uint8_t* kv(int layer, int which) const {
    const size_t element = c_.kv_format == F32 ? 4 : 2;
    return (uint8_t*)b_.kv_cache + ((size_t)layer * 2 + which) * b_.num_slots * m_.kv_size() * element;
  }

  PlModel& m_;
  const PlConfig& c_;
  const PlBatch& b_;
  const Kernels& k_;
  int threads_;
  std::vector<Taken> taken_;  // [2][threads]
  std::vector<int32_t> slots_, tails_, tail_nodes_;
  std::vector<int> first_nodes_;  // [requests]: its first row that is a tree node, or its end
  std::vector<KeyList> lists_;  // [rows], with first = 0: windows are a layer's matter
  std::vector<AttentionItem> items_;
  std::vector<SpreadItem> spread_;  // [requests], or empty: not shared
  std::vector<SpreadChunk> chunks_;
  size_t scratch_floats_ = 0, keys_floats_ = 0, packed_floats_ = 0, spread_floats_ = 0;
};

// Context slots once per request, ancestor slots once per node: all layers and heads read them.
void Pass::build_key_lists() {
  std::vector<size_t> begins(b_.num_requests + 1, 0);
  for (int r = 0; r < b_.num_requests; r++) {
    int longest = 0;
    for (int row = b_.cu_query[r]; row < b_.cu_query[r + 1]; row++) longest = std::max(longest, b_.context_lens[row]);
    begins[r + 1] = begins[r] + longest;
  }
  slots_.resize(begins[b_.num_requests]);
  for (int r = 0; r < b_.num_requests; r++)
    for (size_t p = 0; p < begins[r + 1] - begins[r]; p++)
      slots_[begins[r] + p] =
          b_.block_tables[(size_t)r * b_.max_blocks + p / b_.block_size] * b_.block_size + (int)(p % b_.block_size);
  std::vector<size_t> tail_begins(b_.num_rows + 1, 0);
  for (int row = 0; row < b_.num_rows; row++) {
    int depth = 0;
    if (b_.is_node[row])
      for (int at = row; at >= 0; at = b_.parents[at]) depth++;
    tail_begins[row + 1] = tail_begins[row] + depth;
  }
  first_nodes_.resize(b_.num_requests);
  for (int r = 0; r < b_.num_requests; r++) {
    first_nodes_[r] = b_.cu_query[r];
    while (first_nodes_[r] < b_.cu_query[r + 1] && !b_.is_node[first_nodes_[r]]) first_nodes_[r]++;
  }
  tails_.resize(tail_begins[b_.num_rows]);
  tail_nodes_.resize(tails_.size());
  lists_.resize(b_.num_rows);
  for (int row = 0; row < b_.num_rows; row++) {
    const int depth = (int)(tail_begins[row + 1] - tail_begins[row]);
    int at = row;
    for (int i = depth - 1; i >= 0; i--, at = b_.parents[at]) {
      tails_[tail_begins[row] + i] = b_.slot_mapping[at];
      tail_nodes_[tail_begins[row] + i] = at - first_nodes_[b_.req_ids[row]];
    }
    const int context = b_.context_lens[row];
    lists_[row] = {slots_.data() + begins[b_.req_ids[row]], tails_.data() + tail_begins[row],
                   tail_nodes_.data() + tail_begins[row], context, 0, context + depth};
  }
}

// Rows per task: more rows share one reading of the keys, fewer make tasks that divide better among the threads.
int Pass::attention_tile() const {
  constexpr float kReading = 0.75f;  // of the keys, in units of one row's work
  int best = 1;
  float best_time = INFINITY;
  const int most = std::clamp(kTaskQueries / (c_.num_heads / c_.num_kv_heads), 1, kAttentionRows);
  for (int tile = 1; tile <= most; tile++) {
    int tasks = 0;
    for (int r = 0; r < b_.num_requests; r++) tasks += (b_.cu_query[r + 1] - b_.cu_query[r] + tile - 1) / tile;
    const int turns = (tasks * c_.num_kv_heads + threads_ - 1) / threads_;
    const float time = (float)turns * (kReading + (float)tile);
    if (time < best_time) best = tile, best_time = time;
  }
  return best;
}

void Pass::build_attention_items() {
  const int tile = attention_tile();
  int most_nodes = 0;
  for (int r = 0; r < b_.num_requests; r++)
    for (int row = b_.cu_query[r]; row < b_.cu_query[r + 1]; row += tile) {
      const int rows = std::min(tile, b_.cu_query[r + 1] - row);
      const int nodes = std::max(0, row + rows - first_nodes_[r]);  // a parent comes before its children
      most_nodes = std::max(most_nodes, nodes);
      for (int head = 0; head < c_.num_kv_heads; head++) items_.push_back({row, rows, head, first_nodes_[r], nodes});
    }
  int longest = 0;
  for (const KeyList& list : lists_) longest = std::max(longest, list.length);
  const int heads = c_.num_heads / c_.num_kv_heads;
  keys_floats_ = (size_t)kMostKeyBlocks * 16 * c_.head_dim;
  packed_floats_ = (size_t)tile * heads * c_.head_dim;
  // One scratch serves attention and, at other times, a tile of two products.
  scratch_floats_ = std::max(keys_floats_ + packed_floats_ + attention_scores(tile, heads, longest, most_nodes),
                             (size_t)2 * kRowTile * 2 * kPanel);
  scratch_floats_ = (scratch_floats_ + 31) / 16 * 16;
}

// Few rows over long contexts read far more than they compute. Then all heads of a stretch of positions are scored
// together, because they lie together, and every thread has its part of the positions, and later of the dimensions:
// neither changes the order in which a score, a softmax or an output is added up.
void Pass::build_spread() {
  const int heads = c_.num_heads / c_.num_kv_heads;
  int longest = 0;
  for (int r = 0; r < b_.num_requests; r++) {
    const int row = b_.cu_query[r], rows = b_.cu_query[r + 1] - row;
    for (int i = row; i < row + rows; i++) longest = std::max(longest, b_.context_lens[i]);
    if (rows > kSpreadRows || c_.head_dim % 16) return;
  }
  if (longest < kSpreadFrom) return;
  for (int r = 0; r < b_.num_requests; r++) {
    SpreadItem item{b_.cu_query[r], b_.cu_query[r + 1] - b_.cu_query[r], first_nodes_[r]};
    item.num_nodes = std::max(0, item.row + item.rows - first_nodes_[r]);
    int context = 0, length = 0;
    for (int row = item.row; row < item.row + item.rows; row++) {
      context = std::max(context, lists_[row].context_len);
      length = std::max(length, lists_[row].length);
    }
    item.scores = spread_floats_;
    item.head_scores = round_up((int)attention_scores(item.rows, heads, std::max(length, context), item.num_nodes), 16);
    spread_floats_ += item.head_scores * c_.num_kv_heads;
    for (int from = 0; item.rows && (from < context || !from); from += kChunk)
      chunks_.push_back({r, from, std::min(context, from + kChunk)});
    spread_.push_back(item);
  }
  const size_t wanted = keys_floats_ + (size_t)kSpreadRows * c_.num_heads * c_.head_dim;
  scratch_floats_ = std::max(scratch_floats_, (wanted + 31) / 16 * 16);
}

void Pass::reserve() {
  const int rows = std::max(b_.num_rows, b_.num_logits);
  m_.x.reserve((size_t)rows * c_.hidden_size);
  m_.qkv.reserve((size_t)rows * m_.qkv_size());
  m_.cos.reserve((size_t)rows * c_.head_dim / 2);
  m_.sin.reserve((size_t)rows * c_.head_dim / 2);
  m_.normed.reserve(rows, c_.hidden_size, m_.any_quantized);
  if (m_.any_quantized) m_.normed_wide.reserve(rows, c_.hidden_size, true, true);
  m_.attended.reserve(rows, m_.q_size(), m_.any_quantized);
  m_.activated.reserve(rows, c_.intermediate_size, m_.any_quantized);
  m_.scratch.reserve(scratch_floats_ * threads_);
  if (spread_floats_) m_.scores.reserve(spread_floats_);
}

// The groups of q, k and v, counted through.
struct QkvGroup {
  const Matrix* matrix;
  int group, column;  // column: where the part begins in a row of qkv
};
QkvGroup qkv_group(const PlModel& m, const Layer& layer, int i) {
  if (i < num_groups(layer.q)) return {&layer.q, i, 0};
  i -= num_groups(layer.q);
  if (i < num_groups(layer.k)) return {&layer.k, i, m.k_begin()};
  return {&layer.v, i - num_groups(layer.k), m.v_begin()};
}
int num_qkv_groups(const Layer& layer) { return num_groups(layer.q) + num_groups(layer.k) + num_groups(layer.v); }

const void* Pass::Worker::start_of(const Layer& layer) const {
  const QkvGroup first = qkv_group(p.m_, layer, home_begin(num_qkv_groups(layer)));
  return group_data(*first.matrix, first.group);
}

void Pass::Worker::run() {
  embed();
  for (int i = 0, next = 0; i < p.c_.num_layers; i++) {
    capture(i);
    if (next == p.b_.num_run_layers || p.b_.run_layers[next] != i) continue;
    next++;
    layer(i, next < p.b_.num_run_layers ? start_of(p.m_.layers[p.b_.run_layers[next]]) : start_of(p.m_.head));
  }
  capture(p.c_.num_layers);
  capture(p.c_.num_layers + 1);
  logits();
}

void Pass::Worker::embed() {
  const int half = p.c_.head_dim / 2;
  share(PL_STEP_EMBED, p.b_.num_rows, [&](int row) {
    unpack_row(p.m_.embed, p.b_.token_ids[row], p.m_.x.get() + (size_t)row * p.c_.hidden_size);
    for (int i = 0; i < half; i++) {
      const float angle = (float)p.b_.positions[row] * p.m_.inv_freq[i];
      p.m_.cos.get()[(size_t)row * half + i] = cosf(angle) * p.c_.rope_scale;
      p.m_.sin.get()[(size_t)row * half + i] = sinf(angle) * p.c_.rope_scale;
    }
  });
}

void Pass::Worker::capture(int id) {
  const int n = p.b_.num_hidden, size = p.c_.hidden_size;
  for (int j = 0; j < n; j++) {
    if (p.b_.hidden_layers[j] != id) continue;
    share(PL_STEP_EMBED, p.b_.num_rows, [&](int row) {
      const float* x = p.m_.x.get() + (size_t)row * size;
      float* to = p.b_.hidden + ((size_t)row * n + j) * size;
      if (id == p.c_.num_layers + 1) p.k_.rms_norm(x, p.m_.final_norm, p.c_.rms_norm_eps, size, to);
      else memcpy(to, x, (size_t)size * 4);
    });
  }
}

void Pass::Worker::layer(int index, const void* after) {
  const Layer& layer = p.m_.layers[index];
  norm_rows(layer.input_norm, nullptr, p.b_.num_rows, is_quantized(layer.v.format));
  project_qkv(layer, start_of(layer.o));
  rotate_and_store(layer, index);
  attend(layer, index);
  project_add(PL_STEP_O, layer.o, p.m_.attended, start_of(layer.gate));
  norm_rows(layer.post_norm, nullptr, p.b_.num_rows);
  gate_up(layer, start_of(layer.down));
  project_add(PL_STEP_DOWN, layer.down, p.m_.activated, after);
}

// normed[i] = norm(x[rows[i]]), or of row i where rows is null; also in wide integers where asked.
void Pass::Worker::norm_rows(const float* weight, const int32_t* rows, int n, bool wide) {
  const Activations& to = p.m_.normed;
  share(PL_STEP_NORM, n, [&](int i) {
    const float* x = p.m_.x.get() + (size_t)(rows ? rows[i] : i) * p.c_.hidden_size;
    float* out = to.x + (size_t)i * to.stride;
    p.k_.rms_norm(x, weight, p.c_.rms_norm_eps, p.c_.hidden_size, out);
    if (p.m_.any_quantized) p.k_.quantize(to, i, 1, 0, out, 0, p.c_.hidden_size);
    if (wide) p.k_.quantize(p.m_.normed_wide, i, 1, 0, out, 0, p.c_.hidden_size);
  });
}

// Adds a matrix's bias to what was made by `panels` of its panels.
void add_bias(const Matrix& w, int panel, int panels, int rows, float* out, size_t stride) {
  if (!w.bias) return;
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < panels * kPanel; i++) out[row * stride + i] += w.bias[panel * kPanel + i];
}

void Pass::Worker::project_qkv(const Layer& layer, const void* after) {
  const int n = num_qkv_groups(layer), width = p.m_.qkv_size();
  share(PL_STEP_QKV, n, [&](int i) {
    const QkvGroup at = qkv_group(p.m_, layer, i);
    const int panel = at.group * kGroup, panels = std::min(kGroup, at.matrix->num_panels - panel);
    const void* next = after;
    if (!is_last_at_home(i, n) && i + 1 < n) {
      const QkvGroup following = qkv_group(p.m_, layer, i + 1);
      next = group_data(*following.matrix, following.group);
    }
    float* out = p.m_.qkv.get() + at.column + panel * kPanel;
    // Most of what 8-bit activations cost in fidelity, they cost in v, which is a small part of the work.
    const bool wide = at.matrix == &layer.v && is_quantized(layer.v.format);
    const Activations& x = wide ? p.m_.normed_wide : p.m_.normed;
    p.k_.matmul(*at.matrix, panel, panels, x, 0, p.b_.num_rows, next, out, width);
    add_bias(*at.matrix, panel, panels, p.b_.num_rows, out, width);
  });
}

void Pass::Worker::rotate_and_store(const Layer& layer, int index) {
  const int dim = p.c_.head_dim, half = dim / 2, kv_size = p.m_.kv_size();
  const size_t slot_bytes = (size_t)kv_size * (p.c_.kv_format == F32 ? 4 : 2);
  share(PL_STEP_ROTATE, p.b_.num_rows, [&](int row) {
    float* qkv = p.m_.qkv.get() + (size_t)row * p.m_.qkv_size();
    const float *cos = p.m_.cos.get() + (size_t)row * half, *sin = p.m_.sin.get() + (size_t)row * half;
    for (int h = 0; h < p.c_.num_heads + p.c_.num_kv_heads; h++) {
      const bool is_key = h >= p.c_.num_heads;
      float* head = is_key ? qkv + p.m_.k_begin() + (h - p.c_.num_heads) * dim : qkv + h * dim;
      const float* norm = is_key ? layer.k_norm : layer.q_norm;
      if (norm) p.k_.rms_norm(head, norm, p.c_.rms_norm_eps, dim, head);
      if (layer.rotates) p.k_.rope(head, cos, sin, dim);
    }
    const size_t slot = (size_t)p.b_.slot_mapping[row] * slot_bytes;
    p.k_.store_kv(qkv + p.m_.k_begin(), kv_size, p.kv(index, 0) + slot, p.c_.kv_format);
    p.k_.store_kv(qkv + p.m_.v_begin(), kv_size, p.kv(index, 1) + slot, p.c_.kv_format);
  });
}

void Pass::Worker::attend(const Layer& layer, int index) {
  if (!p.spread_.empty() && !layer.window) return attend_spread(index);
  const int heads = p.c_.num_heads / p.c_.num_kv_heads, dim = p.c_.head_dim, span = heads * dim;
  const size_t element = p.c_.kv_format == F32 ? 4 : 2;
  const Activations& out = p.m_.attended;
  const bool quantize_here = p.m_.any_quantized && span % kBlock == 0;
  share(PL_STEP_ATTEND, (int)p.items_.size(), [&](int i) {
    const AttentionItem item = p.items_[i];
    KeyList lists[kAttentionRows];
    for (int r = 0; r < item.rows; r++) {
      lists[r] = p.lists_[item.row + r];
      if (layer.window) lists[r].first = std::max(0, lists[r].length - layer.window);
    }
    const int column = item.kv_head * span;
    const size_t head_bytes = (size_t)item.kv_head * dim * element;
    p.k_.attention({p.m_.qkv.get() + (size_t)item.row * p.m_.qkv_size() + column, lists,
                    out.x + (size_t)item.row * out.stride + column, (size_t)p.m_.qkv_size(), (size_t)out.stride,
                    item.rows, heads, p.b_.slot_mapping + item.first_node, item.num_nodes, dim,
                    p.kv(index, 0) + head_bytes, p.kv(index, 1) + head_bytes, (size_t)p.m_.kv_size(),
                    p.c_.kv_format, 1.0f / sqrtf((float)dim), scratch(), scratch() + p.keys_floats_,
                    scratch() + p.keys_floats_ + p.packed_floats_});
    if (!quantize_here) return;
    p.k_.quantize(out, item.row, item.rows, column / kBlock, out.x + (size_t)item.row * out.stride + column, out.stride,
                  span);
  });
  if (p.m_.any_quantized && !quantize_here)
    share(PL_STEP_ATTEND, p.b_.num_rows,
          [&](int row) { p.k_.quantize(out, row, 1, 0, out.x + (size_t)row * out.stride, 0, p.m_.q_size()); });
}

// One task for each key/value head of the request.
std::vector<AttentionTask> Pass::Worker::spread_tasks(const SpreadItem& item, int index) const {
  const int heads = p.c_.num_heads / p.c_.num_kv_heads, dim = p.c_.head_dim, span = heads * dim;
  const size_t element = p.c_.kv_format == F32 ? 4 : 2, width = p.m_.qkv_size(), stride = p.m_.attended.stride;
  std::vector<AttentionTask> tasks;
  for (int head = 0; head < p.c_.num_kv_heads; head++) {
    const size_t head_bytes = (size_t)head * dim * element;
    float* packed = scratch() + p.keys_floats_ + (size_t)head * item.rows * span;
    tasks.push_back({p.m_.qkv.get() + item.row * width + head * span, p.lists_.data() + item.row,
                     p.m_.attended.x + item.row * stride + head * span, width, stride, item.rows, heads,
                     p.b_.slot_mapping + item.first_node, item.num_nodes, dim, p.kv(index, 0) + head_bytes,
                     p.kv(index, 1) + head_bytes, (size_t)p.m_.kv_size(), p.c_.kv_format, 1.0f / sqrtf((float)dim),
                     scratch(), packed, p.m_.scores.get() + item.scores + head * item.head_scores});
  }
  return tasks;
}

void Pass::Worker::attend_spread(int index) {
  const int heads = p.c_.num_heads / p.c_.num_kv_heads, kv_heads = p.c_.num_kv_heads;
  share(PL_STEP_ATTEND, (int)p.chunks_.size(), [&](int i) {
    const SpreadChunk chunk = p.chunks_[i];
    const auto tasks = spread_tasks(p.spread_[chunk.item], index);
    p.k_.score_positions(tasks.data(), kv_heads, chunk.from, chunk.to);
  });
  share(PL_STEP_ATTEND, p.b_.num_rows * p.c_.num_heads, [&](int i) {
    const int row = i / p.c_.num_heads, head = i % p.c_.num_heads;
    const SpreadItem& item = p.spread_[p.b_.req_ids[row]];
    p.k_.weigh(spread_tasks(item, index)[head / heads], (row - item.row) * heads + head % heads);
  });
  const int items = (int)p.spread_.size(), parts = (p.threads_ + items - 1) / items;
  const int vectors = kv_heads * p.c_.head_dim / 16;
  share(PL_STEP_ATTEND, items * parts, [&](int i) {
    const int from = vectors * (i % parts) / parts * 16, to = vectors * (i % parts + 1) / parts * 16;
    const SpreadItem& item = p.spread_[i / parts];
    if (from < to && item.rows) p.k_.add_dimensions(spread_tasks(item, index).data(), kv_heads, from, to);
  });
  const Activations& out = p.m_.attended;
  if (p.m_.any_quantized)
    share(PL_STEP_ATTEND, p.b_.num_rows,
          [&](int row) { p.k_.quantize(out, row, 1, 0, out.x + (size_t)row * out.stride, 0, p.m_.q_size()); });
}

// x += w * activations (+ bias)
void Pass::Worker::project_add(PlStep what, const Matrix& w, const Activations& x, const void* after) {
  const int n = num_groups(w), width = kGroup * kPanel;
  share(what, n, [&](int i) {
    const int panel = i * kGroup, panels = std::min(kGroup, w.num_panels - panel);
    const int columns = std::min(width, w.n - panel * kPanel);
    for (int row = 0; row < p.b_.num_rows; row += kRowTile) {
      const int rows = std::min(kRowTile, p.b_.num_rows - row);
      const void* next = row + rows < p.b_.num_rows ? nullptr : is_last_at_home(i, n) ? after : group_data(w, i + 1);
      p.k_.matmul(w, panel, panels, x, row, rows, next, scratch(), width);
      add_bias(w, panel, panels, rows, scratch(), width);
      for (int r = 0; r < rows; r++) {
        const float* from = scratch() + (size_t)r * width;
        float* to = p.m_.x.get() + (size_t)(row + r) * p.c_.hidden_size + panel * kPanel;
        for (int j = 0; j < columns; j++) to[j] += from[j];
      }
    }
  });
}

// activated = silu(gate) * up, a block of 32 columns at a time so that it can be quantized on the spot
void Pass::Worker::gate_up(const Layer& layer, const void* after) {
  const Activations& out = p.m_.activated;
  const int n = num_groups(layer.gate), width = kGroup * kPanel;
  float *gate = scratch(), *up = gate + kRowTile * width;
  share(PL_STEP_GATE_UP, n, [&](int i) {
    const int panel = i * kGroup, panels = std::min(kGroup, layer.gate.num_panels - panel);
    const int columns = std::min(width, layer.gate.n - panel * kPanel);
    for (int row = 0; row < p.b_.num_rows; row += kRowTile) {
      const int rows = std::min(kRowTile, p.b_.num_rows - row);
      const void* next =
          row + rows < p.b_.num_rows ? nullptr : is_last_at_home(i, n) ? after : group_data(layer.gate, i + 1);
      const void* up_data = row ? nullptr : group_data(layer.up, i);
      p.k_.matmul(layer.gate, panel, panels, p.m_.normed, row, rows, up_data, gate, width);
      p.k_.matmul(layer.up, panel, panels, p.m_.normed, row, rows, next, up, width);
      add_bias(layer.gate, panel, panels, rows, gate, width);
      add_bias(layer.up, panel, panels, rows, up, width);
      float* to = out.x + (size_t)row * out.stride + panel * kPanel;
      p.k_.silu_mul(gate, up, width, rows, columns, to, out.stride);
      if (p.m_.any_quantized) p.k_.quantize(out, row, rows, i, to, out.stride, columns);
    }
  });
}

void Pass::Worker::logits() {
  norm_rows(p.m_.final_norm, p.b_.logits_rows, p.b_.num_logits);
  const Matrix& w = p.m_.head;
  const int n = num_groups(w), rows = p.b_.num_logits;
  if (!rows) return;
  share(PL_STEP_LOGITS, n, [&](int i) {
    const int panel = i * kGroup, panels = std::min(kGroup, w.num_panels - panel);
    const void* next = is_last_at_home(i, n) ? nullptr : group_data(w, i + 1);
    float* out = p.b_.logits + (size_t)panel * kPanel;
    if ((panel + panels) * kPanel <= w.n) {
      p.k_.matmul(w, panel, panels, p.m_.normed, 0, rows, next, out, w.n);
      return;
    }
    for (int row = 0; row < rows; row++) {  // the last panel is partial and must not run into the next row
      p.k_.matmul(w, panel, panels, p.m_.normed, row, 1, nullptr, scratch(), kGroup * kPanel);
      memcpy(out + (size_t)row * w.n, scratch(), (size_t)(w.n - panel * kPanel) * 4);
    }
  });
}

}  // namespace

void run_pass(PlModel& model, const PlBatch& batch) { Pass(model, batch).run(); }
