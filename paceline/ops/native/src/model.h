// A decoder: packed weights and the buffers of its passes.
#pragma once
#include <stdlib.h>

#include <new>
#include <vector>

#include "api.h"
#include "arena.h"
#include "kernels.h"

const Kernels& kernels();

// Grows, never shrinks, and does not keep its contents. Cache-line aligned, with a register's width to spare.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }
  T* reserve(size_t n) {
    if (n > size_ || !data_) {
      free(data_);
      size_ = n;
      data_ = (T*)aligned_alloc(64, (n * sizeof(T) + 128) / 64 * 64);
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Activations with their memory. Quantized parts exist only where some matrix reads them.
struct ActivationBuffer : Activations {
  void reserve(int num_rows, int k, bool quantized, bool wide = false) {
    rows = num_rows;
    stride = round_up(k, kBlock);
    blocks = stride / kBlock;
    x = floats_.reserve((size_t)rows * stride);
    if (!quantized) return;
    quant = quant_.reserve((size_t)rows * blocks);
    low = wide ? low_.reserve((size_t)rows * stride) : nullptr;
  }

 private:
  Buffer<float> floats_;
  Buffer<RowBlock> quant_;
  Buffer<int8_t> low_;
};

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *input_norm = nullptr, *post_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  int window = 0;
  bool rotates = true;
};

struct PlModel {
  PlConfig config{};
  std::vector<float> inv_freq;
  std::vector<Layer> layers;
  Matrix embed, head;
  const float* final_norm = nullptr;
  Arena arena;
  size_t mapped_bytes = 0;  // of matrices that lie in the caller's memory
  bool any_quantized = false;
  double* profile = nullptr;  // [threads][PL_STEPS][working, waiting] seconds, added to; or null

  // Buffers of a pass, kept between passes.
  Buffer<float> x, qkv, cos, sin, scratch, scores;
  ActivationBuffer normed, normed_wide, attended, activated;

  int q_size() const { return config.num_heads * config.head_dim; }
  int kv_size() const { return config.num_kv_heads * config.head_dim; }
  // Columns of qkv; each part begins at a panel.
  int k_begin() const { return round_up(q_size(), kPanel); }
  int v_begin() const { return k_begin() + round_up(kv_size(), kPanel); }
  int qkv_size() const { return v_begin() + round_up(kv_size(), kPanel); }
};

// Runs the pass on the model's threads. The batch has been checked.
void run_pass(PlModel& model, const PlBatch& batch);
