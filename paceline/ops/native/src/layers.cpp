// Parts of drafter networks, called one by one: a matrix, or a decoder layer with its own input.
//
// paceline/ops/native/layers.py declares this interface again for ctypes.
#include "layer_pass.h"
#include "pack.h"

extern "C" {

PlMatrix* pl_matrix_new(int32_t source, int32_t format, int32_t n, int32_t k, const void* data, const float* bias,
                        int32_t threads) {
  try {
    PlMatrix* m = new PlMatrix;
    if (!pack_matrix(m->matrix, m->arena, source, data, n, k, format, threads)) {
      delete m;
      return nullptr;
    }
    if (bias) {
      float* to = (float*)m->arena.allocate((size_t)m->matrix.num_panels * kPanel * 4);
      memcpy(to, bias, (size_t)n * 4);
      m->matrix.bias = to;
    }
    return m;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_matrix_free(PlMatrix* matrix) { delete matrix; }

// out[rows][n] = x[rows][k] times the matrix (+ bias)
int32_t pl_matrix_multiply(PlMatrix* matrix, int32_t rows, const float* x, int32_t threads, float* out) {
  const Matrix& w = matrix->matrix;
  const size_t scratch = (size_t)kRows * kGroup * kPanel;
  try {
    matrix->input.reserve(rows, w.k, is_quantized(w.format));
    matrix->scratch.reserve(scratch * threads);
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  const Activations& a = matrix->input;
  team().run(threads, [&](int thread) {
    const Share s{thread, threads};
    s.deal(rows, [&](int row) {
      memcpy(a.x + (size_t)row * a.stride, x + (size_t)row * w.k, (size_t)w.k * 4);
      if (is_quantized(w.format)) quantize_row(a, row, w.k);
    });
    s.deal(num_groups(w), [&](int i) {
      multiply(w, i, a, rows, s.after(w, i, nullptr), matrix->scratch.get() + thread * scratch, out, w.n);
    });
  });
  return PL_OK;
}

// Filled with pl_model_set_matrix and pl_model_set_vector; needs no embedding, head, first or last norm.
PlModel* pl_layers_new(const PlConfig* config) {
  if (config->num_heads > kTaskQueries * config->num_kv_heads) return nullptr;
  try {
    PlLayers* m = new PlLayers;
    m->config = *config;
    m->inv_freq.assign(config->inv_freq, config->inv_freq + config->head_dim / 2);
    m->layers.resize(config->num_layers);
    return m;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_layers_free(PlModel* layers) { delete static_cast<PlLayers*>(layers); }

int32_t pl_layer_forward(PlModel* layers, const PlLayerBatch* batch) {
  PlLayers& m = *static_cast<PlLayers*>(layers);
  if (const int status = check_rows(m, *batch)) return status;
  if (!batch->num_rows) return PL_OK;
  try {
    LayerPass pass(m, *batch, team().fit(std::max(1, m.config.num_threads), batch->num_rows));
    team().run(pass.threads, [&](int thread) { pass.run(thread); });
  } catch (const std::bad_alloc&) {
    return PL_NO_MEMORY;
  }
  return PL_OK;
}

// Rows of the embedding (head = 0) or of the head (head = 1) as floats: [n][hidden_size]
int32_t pl_model_unpack_rows(const PlModel* model, int32_t head, const int32_t* ids, int32_t n, float* out) {
  const Matrix& w = head ? model->head : model->embed;
  for (int i = 0; i < n; i++) {
    if (ids[i] < 0 || ids[i] >= w.n) return PL_BAD_TOKEN;
    unpack_row(w, ids[i], out + (size_t)i * w.k);
  }
  return PL_OK;
}

// The k largest of each row, largest first, the lowest index where they tie, with their log-softmax. Needs k <= n.
void pl_top_log_probs(const float* x, int32_t rows, int32_t n, int32_t k, int32_t threads, int32_t* ids,
                      float* log_probs) {
  const int used = std::max(1, std::min(threads, rows));
  team().run(used, [&](int thread) {
    for (int row = thread; row < rows; row += used)
      kernels().top_log_probs(x + (size_t)row * n, n, k, ids + (size_t)row * k, log_probs + (size_t)row * k);
  });
}
}
