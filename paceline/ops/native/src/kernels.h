// What the kernels work on, and the table through which one instruction set's kernels are called.
#pragma once
#include <cstddef>
#include <cstdint>

// How a matrix lies in memory. A panel is 16 outputs, so that one register holds one k of all of them.
//   F32, BF16, F16: panel = [k][16 outputs]
//   quantized:      k in blocks of 32; panel = scales [block][16] f16 (and mins [block][16] f16), then the blocks
//     U4:  256 bytes, 4 x 64: byte (16 outputs x 4 k), low nibble k group g, high nibble group g + 4
//     U8:  512 bytes, 8 x 64: byte (16 outputs x 4 k)
//   weight = scale * (u - zero) for U4 (zero 8) and U8 (zero 128); weight = scale * u + min for U4M and U8M (u < 128);
//   U4Z and U8Z have a zero of their own per block: its negative (U8Z: 128 - zero) takes the place of min, and is
//   multiplied by the scale. That is exact where scale * zero is no f16.
enum Format { F32 = 0, BF16 = 1, F16 = 2, U4 = 3, U4M = 4, U8 = 5, U8M = 6, U4Z = 7, U8Z = 8 };
// How keys and values lie in the cache: F32, BF16, F16, or bytes with a float32 scale for each head of a position. A slot
// is then [heads][head_dim] bytes, and after them [heads] scales.
// KV_I16: 16-bit integers with a float32 scale for each head of a position, in tiles of 16 slots (16t .. 16t + 15), as the
// integer dot products of attention_pairs.inc read them: no tile has to be put in order before it is used. A tile holds,
// head after head,
//   of keys    [head_dim / 2][16 slots] pairs of numbers, then [16 slots] scales
//   of values  [8][head_dim] pairs (slots 2i and 2i + 1 of one dimension), then [16 slots] scales
// Heads must have a multiple of 16 dimensions, and blocks a multiple of 16 slots.
constexpr int KV_I8 = 16, KV_I16 = 17, kTile = 16;
static constexpr size_t kv_element_bytes(int kv_format) { return kv_format == F32 ? 4 : kv_format == KV_I8 ? 1 : 2; }
// Of one slot (KV_I16: a sixteenth of a tile), in elements.
static constexpr size_t kv_slot_elements(int kv_format, int kv_heads, int head_dim) {
  return (size_t)kv_heads * (head_dim + (kv_format == KV_I8 ? 4 : kv_format == KV_I16 ? 2 : 0));
}
static constexpr bool is_quantized(int format) { return format >= U4; }
static constexpr bool has_zeros(int format) { return format == U4Z || format == U8Z; }
static constexpr bool has_min(int format) { return format == U4M || format == U8M || has_zeros(format); }
static constexpr bool is_nibble(int format) { return format == U4 || format == U4M || format == U4Z; }
static constexpr bool is_signed(int format) { return format == U8 || format == U8Z; }  // u - 128 is multiplied

constexpr int kPanel = 16, kBlock = 32;
static constexpr int round_up(int n, int step) { return (n + step - 1) / step * step; }

struct Matrix {
  int format = F32;
  int n = 0, k = 0;          // outputs, inputs
  int num_panels = 0;        // ceil(n / 16); lanes past n are zero weights
  int num_blocks = 0;        // ceil(k / 32)
  size_t panel_bytes = 0;
  size_t data_offset = 0;    // quantized: where a panel's blocks begin, after its scales
  uint8_t* data = nullptr;
  const float* bias = nullptr;  // [num_panels * 16], or null
};

// Thirty-two numbers of a row as integers. A cache line each, so that threads that fill different rows write no line in
// common.
struct alignas(64) RowBlock {
  int8_t q[kBlock];
  float scale;        // x ~ scale * n
  float scaled_sum;   // scale * sum(n)
  int32_t minus8;     // -8 * sum(n), cancels U4's zero
  int32_t minus128;   // -128 * sum(n), cancels U8's zero
};

// Rows as matrices read them: floats, integers in blocks of 32, or both. Strides are in elements.
// Narrow integers are n = q. Wide ones are n = 255 * q + low, both within [-127, 127]: about 16 bits, at twice the work.
// One block of all rows lies together, for that is how a kernel that has unpacked a block of weights reads them.
struct Activations {
  float* x = nullptr;         // [rows][stride]
  RowBlock* quant = nullptr;  // [blocks][rows]
  int8_t* low = nullptr;      // [blocks][rows][32], or null: narrow
  int stride = 0, blocks = 0, rows = 0;
  size_t at(int row, int block) const { return (size_t)block * rows + row; }
};

// One row's view of the KV cache for attention: position p's key lies at slots[p] for p < context_len, and at
// tail[p - context_len] from there to length.
struct KeyList {
  const int32_t* slots;
  const int32_t* tail;
  const int32_t* tail_nodes;       // the same as places in the task's node_slots
  int context_len, first, length;  // positions [first, length) are attended to
};

constexpr int kTaskQueries = 256;  // rows * heads of an attention task, at most

struct AttentionTask {
  const float* q;       // first row's first head of the group; rows are q_stride apart
  const KeyList* lists;  // [rows]
  float* out;           // like q, rows out_stride apart
  size_t q_stride, out_stride;
  int rows, heads;      // heads that share this key/value head
  const int32_t* node_slots;  // the tree nodes among which all rows' tails are found
  int num_nodes;
  int head_dim;
  const void* key_cache;    // [slot][slot_stride], at this head; KV_I16: the first tile, at this head
  const void* value_cache;
  size_t slot_stride;       // elements
  int kv_format;            // F32, BF16, F16, KV_I8 or KV_I16
  float scale;
  float* keys;              // scratch: [kMostKeyBlocks][head_dim][16]; KV_I16: of nodes alone
  float* packed;            // scratch: [rows * heads][head_dim]
  float* scores;            // attention_scores(...) or attention_pair_scores(...) floats
  // KV_I8: the first slot's scales of this head, slots slot_stride bytes apart
  const uint8_t *key_scales = nullptr, *value_scales = nullptr;
};

constexpr int kMostKeyBlocks = 2;  // of 16 keys, transposed at a time

static constexpr size_t attention_scores(int rows, int heads, int max_length, int num_nodes) {
  return (size_t)rows * heads * (round_up(max_length, 16) + round_up(num_nodes, 16) + 1) + 16;
}

// KV_I16. attention() holds the scores of kPairPositions positions, the steps that threads share those of max_length.
constexpr int kPairPositions = 256, kPairQueries = 8;  // as many queries share one reading of the values, at most
static constexpr size_t attention_pair_scores(int rows, int heads, int head_dim, int max_length, int num_nodes) {
  const size_t room = round_up(max_length, kPairPositions), nodes = round_up(num_nodes, 16);
  return (size_t)rows * heads * (room + room / 64 + room / kPairPositions + 2 * nodes + 18) + room + nodes +
         nodes / 2 * (head_dim + kPairQueries) + 16;
}

constexpr int kRaceBlock = 64;  // tokens of a race that are looked at again together

struct Kernels {
  const char* name;
  // out[row][16 * p + lane] for panels [panel, panel + panels): the plain product, bias not added. `next` is where
  // the caller will read weights after this (or null).
  void (*matmul)(const Matrix& w, int panel, int panels, const Activations& x, int row, int rows, const void* next,
                 float* out, size_t out_stride);
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // n floats of each row, `stride` apart, to the integers of its blocks from `block` on; values past n count as 0
  void (*quantize)(const Activations& to, int row, int rows, int block, const float* x, size_t stride, int n);
  // gate and up: [rows][stride]; n numbers of each row
  void (*silu_mul)(const float* gate, const float* up, size_t stride, int rows, int n, float* out, size_t out_stride);
  // to += from, n numbers of each row
  void (*add_rows)(const float* from, size_t stride, int rows, int n, float* to, size_t to_stride);
  void (*rope)(float* x, const float* cos, const float* sin, int head_dim);
  // one head at a slot of a layer's keys, or of its values
  void (*store_kv)(const float* x, int heads, int head_dim, int head, bool is_value, void* cache, size_t slot, int kv_format);
  void (*attention)(const AttentionTask& task);
  // The same in steps that several threads share, for the n key/value heads of the same rows: the scores of context
  // positions [from, to) (both multiples of 16, or the end; the first also scores the tree nodes), the weights of one
  // query of a task, the values of dimensions [from, to) of all heads side by side (multiples of 16).
  void (*score_positions)(const AttentionTask* tasks, int n, int from, int to);
  void (*weigh)(const AttentionTask& task, int query);
  void (*add_dimensions)(const AttentionTask* tasks, int n, int from, int to);
  int (*argmax)(const float* x, int n);
  int (*likeliest)(const float* x, int n);  // the same, or -1 where any is not finite
  // the k largest, largest first, and their log-softmax over all n; the lower index first where they tie
  void (*top_log_probs)(const float* x, int n, int k, int32_t* ids, float* log_probs);
  // the Gumbel noise named by `key`, for the ids whose constants (ops/random.py) these are
  void (*keyed_gumbel)(const uint32_t* id_constants, int n, uint64_t key, float* out);
  // the token that wins with that noise, or -1 where numpy has to say; `least` has room for each kRaceBlock tokens
  int (*race)(const float* logits, const uint32_t* id_constants, int n, uint64_t key, float temperature, float* least);
  float (*read)(const float* x, size_t n);  // touches every cache line: for measuring bandwidth
  // For profiles: the first two panels with a stage left out, U4, U4M and U8 alone (false: not this one) ...
  bool (*sweep_without)(int stage, const Matrix& w, const Activations& x, int rows, float* out);
  // ... and n times the byte dot products of a block, 16 outputs x 32 k, with nothing beside them.
  int32_t (*bare_dots)(int n);
};

// Stages of a quantized product that a profile leaves out; products leave out none.
enum LeftOut { NOTHING = 0, UNPACKING = 1, DOTS = 2, SCALES = 3, SUMS = 4 };

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avxvnni;
extern const Kernels* const kernels_avxvnni_or_null;  // null: the compiler did not know it
#elif defined(__aarch64__)
extern const Kernels kernels_neon, kernels_neon_i8mm;
extern const Kernels* const kernels_neon_i8mm_or_null;
#endif
