// What a pass works on, made before the threads begin: lists of keys, attention tasks, buffers.
#include "pass.h"

int Pass::num_tiles(int rows) const {
  const int tiles = (rows + kRowTile - 1) / kRowTile;
  return rows >= kOwnRows * threads_ ? round_up(tiles, threads_) : tiles;
}

void Pass::build_tiles() {
  tiles_ = num_tiles(b_.num_rows);
  const auto plain = [](const Matrix& w) { return !is_quantized(w.format); };
  plain_normed_ = plain(m_.head), plain_attended_ = plain_activated_ = false;
  for (const Layer& l : m_.layers) {
    plain_normed_ |= plain(l.q) || plain(l.k) || plain(l.v) || plain(l.gate) || plain(l.up);
    plain_attended_ |= plain(l.o);
    plain_activated_ |= plain(l.down);
  }
}

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

size_t Pass::score_floats(int rows, int heads, int max_length, int num_nodes) const {
  if (c_.kv_format == KV_I16) return attention_pair_scores(rows, heads, c_.head_dim, max_length, num_nodes);
  return attention_scores(rows, heads, max_length, num_nodes);
}

// Rows per task: more rows share one reading of the keys, fewer make tasks that divide better among the threads.
int Pass::attention_tile() const {
  constexpr float kReading = 0.75f;  // of the keys, in units of one row's work
  int best = 1;
  float best_time = INFINITY;
  const int rows = c_.kv_format == KV_I16 ? kIntegerRows : kAttentionRows;
  const int most = std::clamp(kTaskQueries / (c_.num_heads / c_.num_kv_heads), 1, rows);
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
  const int tile = item_rows_ = attention_tile();
  int most_nodes = 0;
  for (int r = 0; r < b_.num_requests; r++)
    for (int row = b_.cu_query[r]; row < b_.cu_query[r + 1]; row += tile) {
      const int rows = std::min(tile, b_.cu_query[r + 1] - row);
      const int nodes = std::max(0, row + rows - first_nodes_[r]);  // a parent comes before its children
      most_nodes = std::max(most_nodes, nodes);
      for (int head = 0; head < c_.num_kv_heads; head++) items_.push_back({row, rows, head, first_nodes_[r], nodes, row});
    }
  int longest = 0;
  for (const KeyList& list : lists_) longest = std::max(longest, list.length);
  const int heads = c_.num_heads / c_.num_kv_heads;
  keys_floats_ = (size_t)kMostKeyBlocks * 16 * c_.head_dim;
  packed_floats_ = (size_t)tile * heads * c_.head_dim;
  // One scratch serves attention and, at other times, a tile of two products and what they make, or a row.
  out_floats_ = packed_floats_;
  scratch_floats_ = std::max(keys_floats_ + packed_floats_ + out_floats_ +
                                 score_floats(tile, heads, c_.kv_format == KV_I16 ? kPairPositions : longest, most_nodes),
                             std::max({(size_t)3 * kRowTile * kGroup * kPanel, (size_t)round_up(c_.hidden_size, 16),
                                       (size_t)c_.vocab_size / kRaceBlock + 1}));
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
    item.head_scores = round_up((int)score_floats(item.rows, heads, std::max(length, context), item.num_nodes), 16);
    spread_floats_ += item.head_scores * c_.num_kv_heads;
    for (int from = 0; item.rows && (from < context || !from); from += kChunk)
      chunks_.push_back({r, from, std::min(context, from + kChunk)});
    spread_.push_back(item);
  }
  const size_t wanted = keys_floats_ + (size_t)kSpreadRows * c_.num_heads * c_.head_dim;
  scratch_floats_ = std::max(scratch_floats_, (wanted + 31) / 16 * 16);
}

// A request's wanted rows must lie together, and all of its tree nodes be among them.
void Pass::build_last_items() {
  if (b_.num_logits >= b_.num_rows || !b_.num_run_layers || !spread_.empty()) return;
  for (int i = 0; i < b_.num_hidden; i++)
    if (b_.hidden_layers[i] > b_.run_layers[b_.num_run_layers - 1]) return;  // of all rows, behind the last layer
  const int32_t* wanted = b_.logits_rows;
  std::vector<AttentionItem> items;
  int at = 0;
  for (int r = 0; r < b_.num_requests; r++) {
    const int begin = at, end = b_.cu_query[r + 1];
    for (; at < b_.num_logits && wanted[at] < end; at++)
      if (wanted[at] < b_.cu_query[r] || (at > begin && wanted[at] != wanted[at - 1] + 1)) return;
    if (first_nodes_[r] < end && (at == begin || wanted[begin] > first_nodes_[r] || wanted[at - 1] != end - 1)) return;
    for (int i = begin; i < at; i += item_rows_) {
      const int rows = std::min(item_rows_, at - i), nodes = std::max(0, wanted[i] + rows - first_nodes_[r]);
      for (int head = 0; head < c_.num_kv_heads; head++)
        items.push_back({wanted[i], rows, head, first_nodes_[r], nodes, i});
    }
  }
  if (at < b_.num_logits) return;
  drops_rows_ = true;
  last_items_ = std::move(items);
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
