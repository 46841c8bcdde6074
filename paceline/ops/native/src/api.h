// The C interface, as paceline/ops/native/library.py declares it again for ctypes.
#pragma once
#include <cstdint>

extern "C" {

struct PlModel;

struct PlConfig {
  int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
  int32_t kv_format;    // of kernels.h: F32, BF16, F16, KV_I8 or KV_I16
  int32_t num_threads;
  float rms_norm_eps;
  float rope_scale;     // factor on cos and sin
  const float* inv_freq;    // [head_dim / 2], copied
  const int32_t* windows;   // [num_layers]: sliding window, 0: none; copied
  const int32_t* rotates;   // [num_layers]: 0: without rotary embedding; copied
};

// Steps of a pass, for profiles.
enum PlStep {
  PL_STEP_EMBED, PL_STEP_NORM, PL_STEP_QKV, PL_STEP_ROTATE, PL_STEP_ATTEND, PL_STEP_O, PL_STEP_GATE_UP, PL_STEP_DOWN,
  PL_STEP_LOGITS, PL_STEPS
};

enum PlPart {
  PL_EMBED, PL_HEAD, PL_Q, PL_K, PL_V, PL_O, PL_GATE, PL_UP, PL_DOWN,          // matrices
  PL_FINAL_NORM, PL_INPUT_NORM, PL_POST_NORM, PL_Q_NORM, PL_K_NORM,            // vectors
};

struct PlBatch {
  int32_t num_rows, num_requests, max_blocks, block_size, num_logits, num_hidden, num_run_layers;
  int64_t num_slots;
  const int32_t *token_ids, *positions, *slot_mapping, *context_lens, *parents, *req_ids;  // [rows]
  const int32_t *block_tables, *cu_query, *logits_rows;
  const uint8_t* is_node;  // [rows]
  const int32_t *hidden_layers, *run_layers;
  void* kv_cache;  // [layers][2][slots][kv heads][head_dim], or as KV_I8 says
  float* logits;   // [num_logits][vocab]
  float* hidden;   // [rows][num_hidden][hidden_size]
  // How a token is drawn at each of [num_logits], and the tokens, or all null. Temperature 0: the first of the largest
  // logits. -1 where any is not finite, or numpy has to say (noise.inc). PL_NOT_DRAWN at nodes of a draft to which no path
  // of tokens drawn leads.
  const float* temperatures;
  const int64_t* seeds;
  const int32_t* draw_positions;
  const uint32_t* id_constants;  // [vocab], of ops/random.py
  int32_t* tokens;
};

constexpr int32_t PL_NOT_DRAWN = -2;

enum PlStatus { PL_OK, PL_BAD_TOKEN, PL_BAD_SLOT, PL_BAD_ROW, PL_BAD_FORMAT, PL_NO_MEMORY, PL_INCOMPLETE, PL_BAD_TILES };

PlModel* pl_model_new(const PlConfig* config);
void pl_model_free(PlModel* model);
int32_t pl_model_set_matrix(PlModel* model, int32_t part, int32_t layer, int32_t source, int32_t format, int32_t n,
                            int32_t k, const void* data, const float* bias);
// A matrix as it was packed before: the caller keeps `data` for as long as the model lives.
int32_t pl_model_map_matrix(PlModel* model, int32_t part, int32_t layer, int32_t format, int32_t n, int32_t k,
                            const void* data, const float* bias);
struct PlPacked {
  int32_t format, n, k;
  int64_t num_bytes;
  const void* data;
  const float* bias;  // [n], or null
};
int32_t pl_model_packed(PlModel* model, int32_t part, int32_t layer, PlPacked* out);
int32_t pl_model_set_vector(PlModel* model, int32_t part, int32_t layer, int32_t n, const float* data);
void pl_model_tie_head(PlModel* model);
int64_t pl_model_weight_bytes(const PlModel* model);  // that a pass reads
// From now on passes add up here how long each thread works at each step and waits after it (null: no longer).
// to: [threads][PL_STEPS][2] seconds
void pl_model_profile(PlModel* model, double* to);
void pl_model_set_threads(PlModel* model, int32_t num_threads);
int32_t pl_forward(PlModel* model, const PlBatch* batch);
// Keys and values of `layers` layers in KV_I16, from slot to slot. All reads happen before any write.
int32_t pl_move_slots(void* kv_cache, int32_t layers, int64_t num_slots, int32_t kv_heads, int32_t head_dim, int32_t n,
                      const int64_t* sources, const int64_t* targets);
int32_t pl_natural_format(int32_t source);

const char* pl_instruction_set(void);
int32_t pl_select_instruction_set(const char* name);  // 0: this machine or build has it
double pl_measure_bandwidth(int64_t bytes, int32_t num_threads, int32_t repeats);  // best, in bytes per second
// For measuring: how the threads wait (pool.h).
void pl_set_waiting(int32_t how);
int32_t pl_last_threads(void);  // of the last call that had a team
void pl_argmax(const float* x, int32_t rows, int32_t n, int64_t stride, int32_t num_threads, int32_t* out);

// Single kernels, for tests against their plain twins.
int32_t pl_test_matmul(int32_t source, int32_t format, int32_t n, int32_t k, const void* w, int32_t rows,
                       int32_t wide, const float* x, float* out, float* unpacked);
// n jobs that take all_s[i] seconds with all threads and fewer_s[i] with fewer, a share of which is lost to other programs:
// how many threads each is run with.
void pl_test_crowd(int32_t threads, int32_t rows, const double* all_s, const double* fewer_s, const double* lost_share,
                   int32_t n, int32_t* used);
void pl_test_rms_norm(const float* x, const float* weight, float eps, int32_t n, float* out);
void pl_test_silu_mul(const float* gate, const float* up, int32_t n, float* out);
void pl_test_rope(float* x, const float* cos, const float* sin, int32_t head_dim);
// Rows one by one. Row r's keys lie at slots[cu_slots[r] .. cu_slots[r + 1]), the last `tails[r]` of them as a tree
// node's ancestors; kv_layer: [2][num_slots][kv_heads][head_dim].
void pl_test_attention(const float* q, const void* kv_layer, const int32_t* slots, const int32_t* cu_slots,
                       const int32_t* tails, int32_t rows, int32_t num_slots, int32_t heads, int32_t kv_heads,
                       int32_t head_dim, int32_t kv_format, int32_t window, float scale, float* out);
}
