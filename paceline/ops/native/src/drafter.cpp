// EAGLE-3 in whole drafts: one call takes in the target's features, one grows the trees of several requests.
//
// The same arithmetic as calling the parts of layers.cpp one by one, and the same trees as spec/feature/draft_growth.py grows,
// without a host between two levels. paceline/ops/native/drafter.py declares this interface again for ctypes.
#include <functional>

#include "layer_pass.h"
#include "pack.h"

extern "C" {
struct PlEagleParts {
  const PlModel* target;  // its embedding
  PlModel* layers;        // one, whose attention reads [norm(embedding) | norm(feature)]
  PlMatrix *fc, *head;
  const float *fc_norm, *hidden_norm, *embedding_norm, *final_norm;  // fc_norm may be null
  const int32_t* target_ids;                                         // [head outputs]
  const uint32_t* id_constants;                                      // [head outputs]: what their noise is made from
  float eps;
  int32_t norm_before_residual;
};

struct PlEagleContext {
  int32_t num_rows;
  int64_t num_slots;
  const int32_t *next_tokens, *positions, *slots;  // [rows]
  const float* hidden;                             // [rows][inputs of fc]
  float* features;                                 // [rows][hidden_size], written
  float* kv_cache;
};

struct PlEagleDraft {
  int32_t num_requests;
  int64_t num_slots, first_scratch;
  const int32_t *tokens, *positions, *key_begins, *context_lens;  // [requests]; contexts end with the newest pair
  const int32_t *num_nodes, *max_depths, *widths;                 // [requests]: how large each tree may be
  const int32_t* key_slots;
  const float* features;           // [requests][hidden_size]: of the newest pairs
  const float* scales;             // [requests]: the logits are multiplied with it before noise is added
  const uint64_t* const* noise_keys;  // [requests]: [max_depth], names of each level's noise; or null
  double lowest, followed;         // log-probabilities from which a path is kept, and from which it is extended
  float* kv_cache;
  int32_t* num_drafted;            // [requests], written; a request's nodes follow those of the one before
  int32_t *token_ids, *parents;    // [sum of num_nodes], written
  float* log_probs;                // [sum of num_nodes], written: of each node, given its parent
};
}

struct PlEagle {
  PlEagleParts parts;
  PlLayers& layers;
  const Matrix &fc, &head;
  int hidden, threads;
  std::vector<float> fc_norm, hidden_norm, embedding_norm, final_norm;
  std::vector<int32_t> target_ids;
  std::vector<uint32_t> id_constants;
  Buffer<float> input, scratch, logits, noise, streams[2], top_log_probs;
  Buffer<int32_t> top_ids;
  ActivationBuffer fc_input, head_input;

  explicit PlEagle(const PlEagleParts& p)
      : parts(p),
        layers(*static_cast<PlLayers*>(p.layers)),
        fc(p.fc->matrix),
        head(p.head->matrix),
        hidden(layers.config.hidden_size),
        threads(std::max(1, layers.config.num_threads)),
        hidden_norm(p.hidden_norm, p.hidden_norm + hidden),
        embedding_norm(p.embedding_norm, p.embedding_norm + hidden),
        final_norm(p.final_norm, p.final_norm + hidden),
        target_ids(p.target_ids, p.target_ids + head.n),
        id_constants(p.id_constants, p.id_constants + head.n) {
    if (p.fc_norm) fc_norm.assign(p.fc_norm, p.fc_norm + fc.k);
    scratch.reserve(scratch_floats * threads);
  }

  // A draft reads weights, like a pass of one row: what is best for that is best here.
  int fitting_threads() const { return team().fit(threads, 1); }

  static constexpr size_t scratch_floats = (size_t)kRows * kGroup * kPanel;
  float* thread_scratch(int thread) const { return scratch.get() + thread * scratch_floats; }

  // What attention reads for one row; gives back what the residual stream starts from.
  const float* prepare(int row, int token, const float* feature) const {
    float* to = input.get() + (size_t)row * 2 * hidden;
    unpack_row(parts.target->embed, token, to);
    kernels().rms_norm(to, embedding_norm.data(), parts.eps, hidden, to);
    kernels().rms_norm(feature, hidden_norm.data(), parts.eps, hidden, to + hidden);
    return parts.norm_before_residual ? to + hidden : feature;
  }
};

namespace {

// out[rows][n] = w * the rows that `fill` writes into x
template <typename Fill>
void product(const Share& s, const Matrix& w, const Activations& x, int rows, const Matrix* then, float* scratch,
             float* out, Fill fill) {
  s.deal(rows, [&](int row) {
    fill(row, x.x + (size_t)row * x.stride);
    if (is_quantized(w.format)) quantize_row(x, row, w.k);
  });
  s.deal(num_groups(w), [&](int i) { multiply(w, i, x, rows, s.after(w, i, then), scratch, out, w.n); });
}

bool is_token(const PlEagle& e, int token) { return token >= 0 && token < e.parts.target->embed.n; }

struct Node {
  int token, parent;
  float log_prob;
  double path;
  int slot = -1, row = -1;  // of its own key, and of its feature in the level's stream
};

// One request's tree; the twin of `Growth`.
struct Tree {
  int num_nodes, max_depth, width;
  std::vector<Node> nodes;
  std::vector<int> frontier{-1};
  int root_row = 0;

  void extend(const int32_t* ids, const float* log_probs, size_t stride, double followed) {
    const int first = (int)nodes.size();
    for (size_t line = 0; line < frontier.size(); line++) {
      const double above = frontier[line] < 0 ? 0.0 : nodes[frontier[line]].path;
      for (int i = 0; i < width; i++) {
        const float log_prob = log_probs[line * stride + i];
        const double path = above + log_prob;
        nodes.push_back({ids[line * stride + i], frontier[line], log_prob, path == path ? path : -INFINITY});
      }
    }
    std::vector<int> order;
    for (int i = first; i < (int)nodes.size(); i++) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return nodes[a].path > nodes[b].path; });
    if ((int)order.size() > width) order.resize(width);
    double floor = followed;
    if ((int)nodes.size() > num_nodes) {  // a path below the last one that fits cannot come back
      std::vector<double> paths;
      for (const Node& node : nodes) paths.push_back(node.path);
      std::nth_element(paths.begin(), paths.begin() + num_nodes - 1, paths.end(), std::greater<double>());
      floor = std::max(floor, paths[num_nodes - 1]);
    }
    frontier.clear();
    for (int i : order)
      if (nodes[i].path >= floor) frontier.push_back(i);
  }

  // The likeliest nodes, in the order in which they were found: parents come before their children.
  std::vector<int> kept(double lowest) const {
    std::vector<int> order;
    for (int i = 0; i < (int)nodes.size(); i++)
      if (nodes[i].path >= lowest) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return nodes[a].path > nodes[b].path; });
    if ((int)order.size() > num_nodes) order.resize(num_nodes);
    std::sort(order.begin(), order.end());
    return order;
  }
};

// The rows of one level, in the form that a layer takes.
struct Level {
  std::vector<int32_t> tokens, positions, slots, key_begins, context_lens, tail_begins, tail_lens, tail_slots, from;
  std::vector<int> owners;

  int size() const { return (int)tokens.size(); }
  void clear() {
    for (auto* part : {&tokens, &positions, &slots, &key_begins, &context_lens, &tail_begins, &tail_lens, &tail_slots,
                       &from})
      part->clear();
    owners.clear();
  }
  // `source`: the row whose feature it starts from
  void add(const PlEagleDraft& d, int request, int token, int position, int slot, int source) {
    tokens.push_back(token);
    positions.push_back(position);
    slots.push_back(slot);
    key_begins.push_back(d.key_begins[request]);
    context_lens.push_back(d.context_lens[request]);
    tail_begins.push_back((int32_t)tail_slots.size());
    tail_lens.push_back(0);
    from.push_back(source);
    owners.push_back(request);
  }
  void add_path(const Tree& tree, int node) {
    const size_t begin = tail_slots.size();
    for (; node >= 0; node = tree.nodes[node].parent) tail_slots.push_back(tree.nodes[node].slot);
    std::reverse(tail_slots.begin() + begin, tail_slots.end());
    tail_lens.back() = (int32_t)(tail_slots.size() - begin);
  }
};

struct Drafting {
  PlEagle& e;
  const PlEagleDraft& d;
  std::vector<Tree> trees;
  Level level;
  int depth = 0, widest = 1, threads;
  int64_t next_slot;

  static constexpr int kStretch = 1024;  // of noise that one thread makes at a time
  int num_stretches() const { return (e.head.n + kStretch - 1) / kStretch; }

  Drafting(PlEagle& eagle, const PlEagleDraft& draft)
      : e(eagle), d(draft), threads(eagle.fitting_threads()), next_slot(draft.first_scratch) {
    for (int i = 0; i < d.num_requests; i++) {
      trees.push_back({d.num_nodes[i], d.max_depths[i], std::min(d.widths[i], e.head.n)});
      widest = std::max(widest, trees[i].width);
      level.add(d, i, d.tokens[i], d.positions[i], d.key_slots[d.key_begins[i] + d.context_lens[i] - 1], i);
      trees[i].root_row = i;
      if (d.noise_keys[i]) e.noise.reserve((size_t)d.num_requests * e.head.n);
    }
  }

  int run() {
    const float* features = d.features;
    while (level.size()) {
      float* stream = e.streams[depth % 2].reserve((size_t)level.size() * e.hidden);
      if (const int status = run_level(features, stream)) return status;
      grow();
      features = stream;
      descend();
    }
    write();
    return PL_OK;
  }

  int run_level(const float* features, float* stream) {
    const int rows = level.size();
    e.input.reserve((size_t)rows * 2 * e.hidden);
    e.logits.reserve((size_t)rows * e.head.n);
    e.top_ids.reserve((size_t)rows * widest);
    e.top_log_probs.reserve((size_t)rows * widest);
    e.head_input.reserve(rows, e.hidden, is_quantized(e.head.format));
    const PlLayerBatch batch{rows,
                             0,
                             0,
                             d.num_slots,
                             level.positions.data(),
                             level.slots.data(),
                             level.key_begins.data(),
                             level.context_lens.data(),
                             level.tail_begins.data(),
                             level.tail_lens.data(),
                             d.key_slots,
                             level.tail_slots.data(),
                             e.input.get(),
                             stream,
                             d.kv_cache};
    if (const int status = check_rows(e.layers, batch)) return status;
    LayerPass pass(e.layers, batch, threads, &e.head);
    const int noise_units = d.num_requests * num_stretches();
    const auto job = [&](int thread) {
      const Share s{thread, threads};
      s.deal(rows, [&](int row) {
        const float* start = e.prepare(row, level.tokens[row], features + (size_t)level.from[row] * e.hidden);
        memcpy(stream + (size_t)row * e.hidden, start, (size_t)e.hidden * 4);
      });
      pass.run(thread);
      for (int i = s.begin(noise_units); i < s.end(noise_units); i++) make_noise(i);  // read after the next barriers
      product(s, e.head, e.head_input, rows, &e.layers.layers[0].q, e.thread_scratch(thread), e.logits.get(),
              [&](int row, float* to) {
                kernels().rms_norm(stream + (size_t)row * e.hidden, e.final_norm.data(), e.parts.eps, e.hidden, to);
              });
      s.deal(rows, [&](int row) { find_top(row); });
    };
    team().run(threads, job);
    return PL_OK;
  }

  // A stretch of the noise of one request's level, which all of its rows share.
  void make_noise(int unit) {
    const int request = unit / num_stretches(), begin = unit % num_stretches() * kStretch;
    const uint64_t* keys = d.noise_keys[request];
    if (!keys || trees[request].frontier.empty()) return;
    kernels().keyed_gumbel(e.id_constants.data() + begin, std::min(kStretch, e.head.n - begin), keys[depth],
                           e.noise.get() + (size_t)request * e.head.n + begin);
  }

  void find_top(int row) {
    const int n = e.head.n, request = level.owners[row];
    float* logits = e.logits.get() + (size_t)row * n;
    if (d.noise_keys[request]) {
      const float scale = d.scales[request];
      const float* noise = e.noise.get() + (size_t)request * n;
      for (int i = 0; i < n; i++) logits[i] = logits[i] * scale + noise[i];
    }
    int32_t* ids = e.top_ids.get() + (size_t)row * widest;
    kernels().top_log_probs(logits, n, widest, ids, e.top_log_probs.get() + (size_t)row * widest);
    for (int i = 0; i < widest; i++) ids[i] = e.target_ids[ids[i]];
  }

  void grow() {
    size_t row = 0;
    for (Tree& tree : trees) {
      const size_t lines = tree.frontier.size();
      if (lines) tree.extend(e.top_ids.get() + row * widest, e.top_log_probs.get() + row * widest, widest, d.followed);
      row += lines;
    }
    depth++;
  }

  void descend() {
    level.clear();
    for (int i = 0; i < d.num_requests; i++) {
      Tree& tree = trees[i];
      if (depth >= tree.max_depth) tree.frontier.clear();
      for (int node : tree.frontier) {
        Node& fed = tree.nodes[node];
        fed.slot = (int)next_slot++;
        fed.row = level.size();
        const int source = fed.parent < 0 ? tree.root_row : tree.nodes[fed.parent].row;
        level.add(d, i, fed.token, d.positions[i] + depth, fed.slot, source);
        level.add_path(tree, node);
      }
    }
  }

  void write() {
    size_t at = 0;
    for (int i = 0; i < d.num_requests; i++) {
      const std::vector<int> keep = trees[i].kept(d.lowest);
      std::vector<int> index(trees[i].nodes.size(), -1);
      d.num_drafted[i] = (int32_t)keep.size();
      for (size_t j = 0; j < keep.size(); j++, at++) {
        const Node& node = trees[i].nodes[keep[j]];
        index[keep[j]] = (int)j;
        d.token_ids[at] = node.token;
        d.parents[at] = node.parent < 0 ? -1 : index[node.parent];
        d.log_probs[at] = node.log_prob;
      }
    }
  }
};

// Everything that a later read relies on and check_rows does not see.
int check_draft(const PlEagle& e, const PlEagleDraft& d) {
  int64_t nodes = 0;
  for (int i = 0; i < d.num_requests; i++) {
    if (!is_token(e, d.tokens[i])) return PL_BAD_TOKEN;
    if (d.context_lens[i] < 1 || d.num_nodes[i] < 1 || d.max_depths[i] < 1 || d.widths[i] < 1) return PL_BAD_ROW;
    nodes += (int64_t)d.widths[i] * d.max_depths[i];
  }
  return d.first_scratch + nodes > d.num_slots ? PL_BAD_SLOT : PL_OK;
}

}  // namespace

extern "C" {

// Keeps the layers, the matrices and the target, which must outlive it, and copies the rest.
PlEagle* pl_eagle_new(const PlEagleParts* parts) {
  try {
    const Matrix& q = parts->layers->layers[0].q;
    const int hidden = parts->layers->config.hidden_size;
    if (parts->target->embed.k != hidden || parts->fc->matrix.n != hidden || parts->head->matrix.k != hidden ||
        q.k != 2 * hidden)
      return nullptr;
    PlEagle* e = new PlEagle(*parts);
    for (int id : e->target_ids) {
      if (is_token(*e, id)) continue;
      delete e;
      return nullptr;
    }
    return e;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_eagle_free(PlEagle* eagle) { delete eagle; }

// Features of true pairs, and their keys and values.
int32_t pl_eagle_take_in(PlEagle* eagle, const PlEagleContext* context) {
  PlEagle& e = *eagle;
  const PlEagleContext& c = *context;
  for (int row = 0; row < c.num_rows; row++)
    if (!is_token(e, c.next_tokens[row])) return PL_BAD_TOKEN;
  try {
    e.fc_input.reserve(c.num_rows, e.fc.k, is_quantized(e.fc.format));
    e.input.reserve((size_t)c.num_rows * 2 * e.hidden);
    PlLayerBatch batch{};
    batch.num_rows = c.num_rows;
    batch.store_only = 1;
    batch.num_slots = c.num_slots;
    batch.positions = c.positions;
    batch.slots = c.slots;
    batch.input = e.input.get();
    batch.kv_cache = c.kv_cache;
    if (const int status = check_rows(e.layers, batch)) return status;
    const int threads = e.fitting_threads();
    LayerPass pass(e.layers, batch, threads);
    const auto job = [&](int thread) {
      const Share s{thread, threads};
      product(s, e.fc, e.fc_input, c.num_rows, &e.layers.layers[0].k, e.thread_scratch(thread), c.features,
              [&](int row, float* to) {
                const float* from = c.hidden + (size_t)row * e.fc.k;
                if (e.fc_norm.empty()) memcpy(to, from, (size_t)e.fc.k * 4);
                else kernels().rms_norm(from, e.fc_norm.data(), e.parts.eps, e.fc.k, to);
              });
      s.deal(c.num_rows, [&](int row) { e.prepare(row, c.next_tokens[row], c.features + (size_t)row * e.hidden); });
      pass.run(thread);
    };
    team().run(threads, job);
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

int32_t pl_eagle_grow(PlEagle* eagle, const PlEagleDraft* draft) {
  if (const int status = check_draft(*eagle, *draft)) return status;
  try {
    return Drafting(*eagle, *draft).run();
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
}
}
