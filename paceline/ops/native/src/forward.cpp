// The steps of a pass that are not attention.
#include "pack.h"
#include "pass.h"

namespace {
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

// `noise_key` of ops/random.py, for the target's own token.
uint64_t mix64(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
uint64_t sample_key(uint64_t seed, int32_t position) {
  constexpr uint64_t kSample = 1;  // Purpose.SAMPLE
  return mix64(mix64(mix64(seed ^ 0x9E3779B97F4A7C15u) + (uint64_t)position) + (kSample << 32));
}
}  // namespace

const void* Pass::Worker::start_of(const Layer& layer) const {
  const int n = num_qkv_groups(layer);
  const QkvGroup first = qkv_group(p.m_, layer, home_begin(tiles * n) % n);
  return group_data(*first.matrix, first.group);
}

void Pass::Worker::run() {
  embed();
  for (int i = 0, next = 0; i < p.c_.num_layers; i++) {
    capture(i);
    if (next == p.b_.num_run_layers || p.b_.run_layers[next] != i) continue;
    const bool is_last = ++next == p.b_.num_run_layers;
    layer(i, is_last, is_last ? start_of(p.m_.head) : start_of(p.m_.layers[p.b_.run_layers[next]]));
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

void Pass::Worker::layer(int index, bool is_last, const void* after) {
  const Layer& layer = p.m_.layers[index];
  norm_rows(layer.input_norm, nullptr, rows, is_quantized(layer.v.format));
  project_qkv(layer, start_of(layer.o));
  rotate_and_store(layer, index);
  attend(layer, index, is_last);
  if (is_last) keep_wanted_rows();
  project_add(PL_STEP_O, layer.o, p.m_.attended, start_of(layer.gate));
  norm_rows(layer.post_norm, nullptr, rows);
  gate_up(layer, start_of(layer.down));
  project_add(PL_STEP_DOWN, layer.down, p.m_.activated, after);
}

// normed[i] = norm(x[rows[i]]), or of row i where rows is null; also in wide integers where asked.
void Pass::Worker::norm_rows(const float* weight, const int32_t* rows, int n, bool wide) {
  const Activations& to = p.m_.normed;
  share(PL_STEP_NORM, n, [&](int i) {
    const float* x = p.m_.x.get() + (size_t)(rows ? rows[i] : i) * p.c_.hidden_size;
    float* out = p.plain_normed_ ? to.x + (size_t)i * to.stride : scratch();
    p.k_.rms_norm(x, weight, p.c_.rms_norm_eps, p.c_.hidden_size, out);
    if (p.m_.any_quantized) p.k_.quantize(to, i, 1, 0, out, 0, p.c_.hidden_size);
    if (wide) p.k_.quantize(p.m_.normed_wide, i, 1, 0, out, 0, p.c_.hidden_size);
  });
}

// Adds a matrix's bias to what was made by `panels` of its panels.
static void add_bias(const Matrix& w, int panel, int panels, int rows, float* out, size_t stride) {
  if (!w.bias) return;
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < panels * kPanel; i++) out[row * stride + i] += w.bias[panel * kPanel + i];
}

void Pass::Worker::project_qkv(const Layer& layer, const void* after) {
  const int groups = num_qkv_groups(layer), n = tiles * groups, width = p.m_.qkv_size();
  share(PL_STEP_QKV, n, [&](int i) {
    const QkvGroup at = qkv_group(p.m_, layer, i % groups);
    const int row = tile_begin(i / groups), rows = tile_begin(i / groups + 1) - row;
    const int panel = at.group * kGroup, panels = std::min(kGroup, at.matrix->num_panels - panel);
    const void* next = after;
    if (!is_last_at_home(i, n) && i + 1 < n) {
      const QkvGroup following = qkv_group(p.m_, layer, (i + 1) % groups);
      next = group_data(*following.matrix, following.group);
    }
    float* out = p.m_.qkv.get() + (size_t)row * width + at.column + panel * kPanel;
    // Most of what 8-bit activations cost in fidelity, they cost in v, which is a small part of the work.
    const bool wide = at.matrix == &layer.v && is_quantized(layer.v.format);
    const Activations& x = wide ? p.m_.normed_wide : p.m_.normed;
    p.k_.matmul(*at.matrix, panel, panels, x, row, rows, next, out, width);
    add_bias(*at.matrix, panel, panels, rows, out, width);
  });
}

void Pass::Worker::rotate_and_store(const Layer& layer, int index) {
  const int dim = p.c_.head_dim, half = dim / 2, heads = p.c_.num_heads, kv_heads = p.c_.num_kv_heads;
  // A head of a tile of rows: keys of one head lie together (KV_I16), and two threads should not write to one cache line.
  const int units = heads + 2 * kv_heads;
  share(PL_STEP_ROTATE, tiles * units, [&](int i) {
    const int h = i % units, kv_head = (h - heads) % kv_heads, end = tile_begin(i / units + 1);
    const bool is_query = h < heads, is_value = h >= heads + kv_heads;
    const int column = is_query ? h * dim : is_value ? p.m_.v_begin() : p.m_.k_begin() + kv_head * dim;
    const float* norm = is_query ? layer.q_norm : layer.k_norm;
    for (int row = tile_begin(i / units); row < end; row++) {
      float* at = p.m_.qkv.get() + (size_t)row * p.m_.qkv_size();
      float* head = at + column;
      if (!is_value) {
        if (norm) p.k_.rms_norm(head, norm, p.c_.rms_norm_eps, dim, head);
        if (layer.rotates)
          p.k_.rope(head, p.m_.cos.get() + (size_t)row * half, p.m_.sin.get() + (size_t)row * half, dim);
        if (is_query) continue;
      }
      p.k_.store_kv(at + (is_value ? p.m_.v_begin() : p.m_.k_begin()), kv_heads, dim, kv_head, is_value,
                    p.kv(index, is_value), p.b_.slot_mapping[row], p.c_.kv_format);
    }
  });
}

// The stream's rows whose logits are wanted become the first ones. Nobody reads it before the next barrier.
void Pass::Worker::keep_wanted_rows() {
  if (!p.drops_rows_) return;
  rows = p.b_.num_logits, tiles = p.num_tiles(rows);
  const size_t size = p.c_.hidden_size;
  share(PL_STEP_ATTEND, 1, [&](int) {
    for (int i = 0; i < rows; i++)
      if (p.b_.logits_rows[i] != i) memcpy(p.m_.x.get() + i * size, p.m_.x.get() + p.b_.logits_rows[i] * size, size * 4);
  });
}

// x += w * activations (+ bias)
void Pass::Worker::project_add(PlStep what, const Matrix& w, const Activations& x, const void* after) {
  const int groups = num_groups(w), n = tiles * groups, width = kGroup * kPanel;
  share(what, n, [&](int i) {
    const int row = tile_begin(i / groups), rows = tile_begin(i / groups + 1) - row;
    const int panel = i % groups * kGroup, panels = std::min(kGroup, w.num_panels - panel);
    const int columns = std::min(width, w.n - panel * kPanel);
    const void* next = is_last_at_home(i, n) ? after : group_data(w, (i + 1) % groups);
    p.k_.matmul(w, panel, panels, x, row, rows, next, scratch(), width);
    add_bias(w, panel, panels, rows, scratch(), width);
    const size_t size = p.c_.hidden_size;
    p.k_.add_rows(scratch(), width, rows, columns, p.m_.x.get() + row * size + panel * kPanel, size);
  });
}

// activated = silu(gate) * up, a block of 32 columns at a time so that it can be quantized on the spot
void Pass::Worker::gate_up(const Layer& layer, const void* after) {
  const Activations& out = p.m_.activated;
  const int groups = num_groups(layer.gate), n = tiles * groups, width = kGroup * kPanel;
  float *gate = scratch(), *up = gate + kRowTile * width, *made = up + kRowTile * width;
  share(PL_STEP_GATE_UP, n, [&](int i) {
    const int row = tile_begin(i / groups), rows = tile_begin(i / groups + 1) - row, group = i % groups;
    const int panel = group * kGroup, panels = std::min(kGroup, layer.gate.num_panels - panel);
    const int columns = std::min(width, layer.gate.n - panel * kPanel);
    const void* next = is_last_at_home(i, n) ? after : group_data(layer.gate, (i + 1) % groups);
    p.k_.matmul(layer.gate, panel, panels, p.m_.normed, row, rows, group_data(layer.up, group), gate, width);
    p.k_.matmul(layer.up, panel, panels, p.m_.normed, row, rows, next, up, width);
    add_bias(layer.gate, panel, panels, rows, gate, width);
    add_bias(layer.up, panel, panels, rows, up, width);
    float* to = p.plain_activated_ ? out.x + (size_t)row * out.stride + panel * kPanel : made;
    const size_t stride = p.plain_activated_ ? out.stride : width;
    p.k_.silu_mul(gate, up, width, rows, columns, to, stride);
    if (p.m_.any_quantized) p.k_.quantize(out, row, rows, group, to, stride, columns);
  });
}

void Pass::Worker::logits() {
  norm_rows(p.m_.final_norm, p.drops_rows_ ? nullptr : p.b_.logits_rows, p.b_.num_logits);
  const Matrix& w = p.m_.head;
  const int n = num_groups(w), rows = p.b_.num_logits;
  if (!rows) return;
  if (p.b_.tokens && !thread) std::fill_n(p.b_.tokens, rows, PL_NOT_DRAWN);
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
  if (p.b_.tokens) share(PL_STEP_LOGITS, rows, [&](int row) { draw_path(row); });
}

// The token after a committed row, then, as long as a node of the draft behind it carries that token, the one after that.
void Pass::Worker::draw_path(int at) const {
  const PlBatch& b = p.b_;
  const auto is_node = [&](int i) { return i < b.num_logits && b.is_node[b.logits_rows[i]]; };
  if (is_node(at)) return;  // it is its request's path that comes by here
  for (int parent = -1;;) {
    const int token = b.tokens[at] = draw(at);
    do at++;
    while (is_node(at) && (b.parents[b.logits_rows[at]] != parent || b.token_ids[b.logits_rows[at]] != token));
    if (!is_node(at)) return;
    parent = b.logits_rows[at];
  }
}

int Pass::Worker::draw(int row) const {
  const PlBatch& b = p.b_;
  const int n = p.m_.head.n;
  const float* logits = b.logits + (size_t)row * n;
  const float temperature = b.temperatures[row];
  if (temperature == 0.0f) return p.k_.likeliest(logits, n);
  return p.k_.race(logits, b.id_constants, n, sample_key((uint64_t)b.seeds[row], b.draw_positions[row]), temperature, scratch());
}

void run_pass(PlModel& model, const PlBatch& batch) { Pass(model, batch).run(); }
