// The attention of a pass: tasks of some rows over one key/value head, or one request shared by all threads.
#include "pass.h"

void Pass::Worker::attend(const Layer& layer, int index, bool is_last) {
  if (!p.spread_.empty() && !layer.window) return attend_spread(index);
  const int heads = p.c_.num_heads / p.c_.num_kv_heads, dim = p.c_.head_dim, span = heads * dim;
  const Activations& out = p.m_.attended;
  const bool quantize_here = p.m_.any_quantized && span % kBlock == 0, to_scratch = quantize_here && !p.plain_attended_;
  const std::vector<AttentionItem>& items = is_last && p.drops_rows_ ? p.last_items_ : p.items_;
  share(PL_STEP_ATTEND, (int)items.size(), [&](int i) {
    const AttentionItem item = items[i];
    KeyList lists[kIntegerRows];
    for (int r = 0; r < item.rows; r++) {
      lists[r] = p.lists_[item.row + r];
      if (layer.window) lists[r].first = std::max(0, lists[r].length - layer.window);
    }
    const int column = item.kv_head * span;
    float* to = to_scratch ? scratch() + p.keys_floats_ + p.packed_floats_ : out.x + (size_t)item.to * out.stride + column;
    const size_t stride = to_scratch ? span : out.stride;
    const size_t head = item.kv_head * p.head_bytes();
    p.k_.attention({p.m_.qkv.get() + (size_t)item.row * p.m_.qkv_size() + column, lists,
                    to, (size_t)p.m_.qkv_size(), stride,
                    item.rows, heads, p.b_.slot_mapping + item.first_node, item.num_nodes, dim,
                    p.kv(index, 0) + head, p.kv(index, 1) + head, p.slot_elements(),
                    p.c_.kv_format, 1.0f / sqrtf((float)dim), scratch(), scratch() + p.keys_floats_,
                    scratch() + p.keys_floats_ + p.packed_floats_ + p.out_floats_, p.scales(index, 0, item.kv_head),
                    p.scales(index, 1, item.kv_head)});
    if (quantize_here) p.k_.quantize(out, item.to, item.rows, column / kBlock, to, stride, span);
  });
  if (p.m_.any_quantized && !quantize_here)
    share(PL_STEP_ATTEND, is_last && p.drops_rows_ ? p.b_.num_logits : p.b_.num_rows,
          [&](int row) { p.k_.quantize(out, row, 1, 0, out.x + (size_t)row * out.stride, 0, p.m_.q_size()); });
}

// One task for each key/value head of the request.
std::vector<AttentionTask> Pass::Worker::spread_tasks(const SpreadItem& item, int index) const {
  const int heads = p.c_.num_heads / p.c_.num_kv_heads, dim = p.c_.head_dim, span = heads * dim;
  const size_t width = p.m_.qkv_size(), stride = p.m_.attended.stride;
  std::vector<AttentionTask> tasks;
  for (int head = 0; head < p.c_.num_kv_heads; head++) {
    float* packed = scratch() + p.keys_floats_ + (size_t)head * item.rows * span;
    tasks.push_back({p.m_.qkv.get() + item.row * width + head * span, p.lists_.data() + item.row,
                     p.m_.attended.x + item.row * stride + head * span, width, stride, item.rows, heads,
                     p.b_.slot_mapping + item.first_node, item.num_nodes, dim, p.kv(index, 0) + head * p.head_bytes(),
                     p.kv(index, 1) + head * p.head_bytes(), p.slot_elements(), p.c_.kv_format, 1.0f / sqrtf((float)dim),
                     scratch(), packed, p.m_.scores.get() + item.scores + head * item.head_scores,
                     p.scales(index, 0, head), p.scales(index, 1, head)});
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
