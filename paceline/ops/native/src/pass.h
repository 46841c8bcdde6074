// One pass over all layers: what it works on (pass_plan.cpp), attention (pass_attention.cpp) and the rest (forward.cpp).
//
// Every thread of the team runs it: each step deals its work out, then all meet. A step's work is a range of units (a row, a
// group of two panels, an attention task). Every thread has a home stretch of it and helps others when done. Home
// stretches make the order of memory known in advance, so that each product can ask for the weights that come after
// it, across the end of the step too.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "model.h"
#include "pool.h"

constexpr int kRowTile = 64;        // rows of a product that wait in scratch for what follows it
constexpr int kOwnRows = 32;        // rows for each thread from which threads share a pass by rows rather than by outputs
constexpr int kAttentionRows = 16;  // rows that share one reading of the keys ...
constexpr int kIntegerRows = 32;    // ... where their scores' room does not grow with the context (KV_I16): 16 take 5 % longer
constexpr int kSpreadRows = 2;      // rows of a request up to which threads share the reading of its keys ...
constexpr int kSpreadFrom = 512;    // ... from this many on: below, meeting three times more costs what it brings
constexpr int kTakes = 32;          // times that a thread takes units in a step, about: what is left to share at the end
constexpr int kChunk = 256;         // positions whose scores are one unit of work
constexpr int kGroup = 2;           // panels that are multiplied together: 32 outputs, one block of what comes after

inline int num_groups(const Matrix& w) { return (w.num_panels + kGroup - 1) / kGroup; }
inline const uint8_t* group_data(const Matrix& w, int group) { return w.data + (size_t)group * kGroup * w.panel_bytes; }

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct AttentionItem {
  int row, rows, kv_head;
  int first_node, num_nodes;  // the rows' ancestors are among these rows of the pass
  int to;                     // the row that the first one's output becomes
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
      : m_(model), c_(model.config), b_(batch), k_(kernels()), wanted_(std::max(1, model.config.num_threads)),
        threads_(team().fit(wanted_, batch.num_rows)) {
    taken_ = std::vector<Taken>(2 * (size_t)threads_);
    build_tiles();
    build_key_lists();
    build_attention_items();
    build_spread();
    build_last_items();
    reserve();
  }

  void run() {
    team().run(threads_, [this](int thread) { Worker{*this, thread, team()}.run(); },
               {wanted_, b_.num_rows});
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
    int rows = p.b_.num_rows, tiles = p.tiles_;  // that later steps work on
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
      // Taking units waits for all that was stored before: where there are many, several are taken at once.
      const int grain = std::max(1, n / (kTakes * p.threads_));
      // No thread is in the next step before the barrier below, nor in the last one since the barrier above.
      p.taken_[((step + 1) % 2) * p.threads_ + thread].count.store(0, std::memory_order_relaxed);
      for (int turn = 0; turn < p.threads_; turn++) {
        const int whose = (thread + turn) % p.threads_, end = home(n, whose + 1);
        for (;;) {
          const int first = home(n, whose) + now[whose].count.fetch_add(grain, std::memory_order_relaxed);
          if (first >= end) break;
          for (int i = first; i < std::min(first + grain, end); i++) f(i);
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
    void layer(int index, bool is_last, const void* after);
    void capture(int id);
    void norm_rows(const float* weight, const int32_t* rows, int n, bool wide = false);
    void project_qkv(const Layer& layer, const void* after);
    void rotate_and_store(const Layer& layer, int index);
    void attend(const Layer& layer, int index, bool is_last);
    void keep_wanted_rows();
    void attend_spread(int index);
    std::vector<AttentionTask> spread_tasks(const SpreadItem& item, int index) const;
    void project_add(PlStep what, const Matrix& w, const Activations& x, const void* after);
    void gate_up(const Layer& layer, const void* after);
    void logits();
    void draw_path(int at) const;
    int draw(int row) const;

    // Where this thread begins to read when it comes to this matrix, or this layer.
    const void* start_of(const Matrix& w) const {
      const int n = num_groups(w);
      return group_data(w, home_begin(tiles * n) % n);
    }
    const void* start_of(const Layer& layer) const;
    int tile_begin(int tile) const { return (int)((int64_t)rows * tile / tiles); }
  };

  size_t slot_elements() const { return kv_slot_elements(c_.kv_format, c_.num_kv_heads, c_.head_dim); }
  size_t slot_bytes() const { return slot_elements() * kv_element_bytes(c_.kv_format); }
  // From one head to the next: of a slot, or of a tile.
  size_t head_bytes() const {
    const int elements = c_.kv_format == KV_I16 ? kTile * (c_.head_dim + 2) : c_.head_dim;
    return elements * kv_element_bytes(c_.kv_format);
  }
  // The scales of a head, where keys and values are bytes.
  const uint8_t* scales(int layer, int which, int head) const {
    return c_.kv_format == KV_I8 ? kv(layer, which) + (size_t)m_.kv_size() + 4 * head : nullptr;
  }
  void build_tiles();
  int num_tiles(int rows) const;
  void build_key_lists();
  size_t score_floats(int rows, int heads, int max_length, int num_nodes) const;
  int attention_tile() const;
  void build_attention_items();
  void build_spread();
  void build_last_items();
  void reserve();
  uint8_t* kv(int layer, int which) const {
    return (uint8_t*)b_.kv_cache + ((size_t)layer * 2 + which) * b_.num_slots * slot_bytes();
  }

  PlModel& m_;
  const PlConfig& c_;
  const PlBatch& b_;
  const Kernels& k_;
  int wanted_, threads_;  // how many there are, and how many take part
  std::vector<Taken> taken_;  // [2][threads]
  // A unit of a product is a tile of rows with a group of outputs, tile by tile. A thread's home is then made of whole
  // tiles where there are many rows, the same ones in every step: what it reads lies in its own cache.
  int tiles_ = 1;
  // Whether any matrix reads these as floats, or integers alone are kept.
  bool plain_normed_ = true, plain_attended_ = true, plain_activated_ = true;
  std::vector<int32_t> slots_, tails_, tail_nodes_;
  std::vector<int> first_nodes_;  // [requests]: its first row that is a tree node, or its end
  std::vector<KeyList> lists_;  // [rows], with first = 0: windows are a layer's matter
  std::vector<AttentionItem> items_;
  // What the last layer adds to rows whose logits nobody wants, nobody reads: from its attention on only the others go on.
  bool drops_rows_ = false;
  std::vector<AttentionItem> last_items_;
  int item_rows_ = 1;  // of an item, at most
  std::vector<SpreadItem> spread_;  // [requests], or empty: not shared
  std::vector<SpreadChunk> chunks_;
  size_t scratch_floats_ = 0, keys_floats_ = 0, packed_floats_ = 0, out_floats_ = 0, spread_floats_ = 0;
};
