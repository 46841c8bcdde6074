#include "pack.h"

#include <math.h>
#include <string.h>

#include "halves.h"
#include "pool.h"

namespace {

// Thirty-two weights of one output as panels keep them.
struct Block {
  uint16_t scale = 0, min = 0;  // f16
  uint8_t u[32];
};

uint16_t read16(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }
uint32_t read32(const uint8_t* p) { return (uint32_t)read16(p) | (uint32_t)read16(p + 2) << 16; }

float load_float(int source, const void* data, size_t i) {
  if (source == SOURCE_F32) return ((const float*)data)[i];
  const uint16_t half = ((const uint16_t*)data)[i];
  return source == SOURCE_BF16 ? bf16_to_float(half) : f16_to_float(half);
}

Block quantize_block(const float* x) {
  float largest = 0.0f;
  for (int i = 0; i < 32; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
  Block block;
  block.scale = float_to_f16(largest / 127.0f);
  const float scale = f16_to_float(block.scale), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < 32; i++) {
    const float q = rintf(x[i] * inverse);  // the rounded scale may push the largest past 127
    block.u[i] = (uint8_t)((int)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q) + 128);
  }
  return block;
}

// GGUF's plain blocks: scale, perhaps min, perhaps 32 high bits, then nibbles (i and i + 16 share a byte) or bytes.
Block plain_block(int source, const uint8_t* p) {
  Block block;
  block.scale = read16(p);
  p += 2;
  if (source == SOURCE_Q8_0) {
    for (int i = 0; i < 32; i++) block.u[i] = (uint8_t)((int8_t)p[i] + 128);
    return block;
  }
  if (source == SOURCE_Q4_1 || source == SOURCE_Q5_1) {
    block.min = read16(p);
    p += 2;
  }
  uint32_t high = 0;
  if (source == SOURCE_Q5_0 || source == SOURCE_Q5_1) {
    high = read32(p);
    p += 4;
  }
  for (int i = 0; i < 16; i++) {
    block.u[i] = (uint8_t)((p[i] & 15) | ((high >> i) & 1) << 4);
    block.u[i + 16] = (uint8_t)((p[i] >> 4) | ((high >> (i + 16)) & 1) << 4);
  }
  if (source == SOURCE_Q5_0)
    for (int i = 0; i < 32; i++) block.u[i] = (uint8_t)(block.u[i] + 112);  // zero 16 -> zero 128
  return block;
}

// GGUF's 256-weight blocks of 4 and 5 bits: eight sub-blocks with a 6-bit scale and min each, under two f16.
Block super_block(int source, const uint8_t* p, int sub) {
  const float d = f16_to_float(read16(p)), dmin = f16_to_float(read16(p + 2));
  const uint8_t* s = p + 4;
  const int scale = sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
  const int min = sub < 4 ? s[sub + 4] & 63 : (s[sub + 4] >> 4) | (s[sub] >> 6) << 4;
  Block block;
  block.scale = float_to_f16(d * (float)scale);
  block.min = float_to_f16(-dmin * (float)min);
  const uint8_t* high = p + 16;
  const uint8_t* low = p + (source == SOURCE_Q5_K ? 48 : 16) + 32 * (sub / 2);
  for (int i = 0; i < 32; i++) {
    block.u[i] = sub % 2 ? low[i] >> 4 : low[i] & 15;
    if (source == SOURCE_Q5_K) block.u[i] = (uint8_t)(block.u[i] | ((high[i] >> sub) & 1) << 4);
  }
  return block;
}

// GGUF's 256-weight blocks of 6 bits: a scale per 16 weights. Widened as GGUF means them, then quantized like floats.
Block widened_block(const uint8_t* p, int sub) {
  const float d = f16_to_float(read16(p + 208));
  const int8_t* scales = (const int8_t*)p + 192;
  float x[32];
  for (int i = 0; i < 32; i++) {
    const int at = 32 * sub + i, within = at % 128, half = at / 128;
    const int low = p[64 * half + within % 64] >> (within < 64 ? 0 : 4) & 15;
    const int high = p[128 + 32 * half + within % 32] >> 2 * (within / 32) & 3;
    x[i] = d * (float)scales[at / 16] * (float)((low | high << 4) - 32);
  }
  return quantize_block(x);
}

// A zero of its own: unsigned weights, scale * (u - zero).
Block zero_block(int source, const uint8_t* p) {
  Block block;
  block.scale = read16(p);
  const float zero = f16_to_float(read16(p + 2));
  block.min = float_to_f16(source == SOURCE_U8Z ? 128.0f - zero : -zero);
  for (int i = 0; i < 32; i++)
    block.u[i] = source == SOURCE_U8Z ? p[4 + i] : (uint8_t)(i < 16 ? p[4 + i] & 15 : p[4 + i - 16] >> 4);
  return block;
}

struct BlockShape { int weights, bytes; };
BlockShape shape_of(int source) {
  switch (source) {
    case SOURCE_Q4_0: return {32, 18};
    case SOURCE_Q4_1: return {32, 20};
    case SOURCE_Q5_0: return {32, 22};
    case SOURCE_Q5_1: return {32, 24};
    case SOURCE_Q8_0: return {32, 34};
    case SOURCE_Q4_K: return {256, 144};
    case SOURCE_Q5_K: return {256, 176};
    case SOURCE_Q6_K: return {256, 210};
    case SOURCE_U4Z: return {32, 20};
    case SOURCE_U8Z: return {32, 36};
    default: return {1, source == SOURCE_F32 ? 4 : 2};
  }
}

Block read_block(int source, const void* data, int row, int b, int k) {
  const BlockShape shape = shape_of(source);
  if (source <= SOURCE_F16) {
    float x[32] = {};
    for (int i = 0; i < 32 && 32 * b + i < k; i++) x[i] = load_float(source, data, (size_t)row * k + 32 * b + i);
    return quantize_block(x);
  }
  const uint8_t* bytes = (const uint8_t*)data + (size_t)row * (k / shape.weights) * shape.bytes;
  if (source >= SOURCE_U4Z) return zero_block(source, bytes + (size_t)b * shape.bytes);
  if (shape.weights == 32) return plain_block(source, bytes + (size_t)b * shape.bytes);
  bytes += (size_t)(b / 8) * shape.bytes;
  return source == SOURCE_Q6_K ? widened_block(bytes, b % 8) : super_block(source, bytes, b % 8);
}

uint8_t* block_data(const Matrix& w, int panel, int b) {
  return w.data + (size_t)panel * w.panel_bytes + w.data_offset + (size_t)b * (is_nibble(w.format) ? 256 : 512);
}

void put_block(Matrix& w, int row, int b, const Block& block) {
  const int lane = row % kPanel;
  uint16_t* scales = (uint16_t*)(w.data + (size_t)(row / kPanel) * w.panel_bytes);
  scales[b * kPanel + lane] = block.scale;
  if (has_min(w.format)) scales[(w.num_blocks + b) * kPanel + lane] = block.min;
  uint8_t* data = block_data(w, row / kPanel, b);
  for (int i = 0; i < 32; i++) {
    const int group = i / 4, byte = lane * 4 + i % 4;
    if (!is_nibble(w.format)) data[64 * group + byte] = block.u[i];
    else data[64 * (group % 4) + byte] |= (uint8_t)(block.u[i] << (group < 4 ? 0 : 4));
  }
}

void put_floats(Matrix& w, int row, int source, const void* data) {
  uint8_t* panel = w.data + (size_t)(row / kPanel) * w.panel_bytes;
  for (int i = 0; i < w.k; i++) {
    const float value = load_float(source, data, (size_t)row * w.k + i);
    const size_t at = (size_t)i * kPanel + row % kPanel;
    if (w.format == F32) ((float*)panel)[at] = value;
    else ((uint16_t*)panel)[at] = w.format == BF16 ? float_to_bf16(value) : float_to_f16(value);
  }
}

}  // namespace

int natural_format(int source) {
  switch (source) {
    case SOURCE_Q4_0: return U4;
    case SOURCE_Q4_1: case SOURCE_Q4_K: return U4M;
    case SOURCE_Q5_0: case SOURCE_Q8_0: case SOURCE_Q6_K: return U8;
    case SOURCE_Q5_1: case SOURCE_Q5_K: return U8M;
    case SOURCE_U4Z: return U4Z;
    case SOURCE_U8Z: return U8Z;
    default: return source;
  }
}

void lay_out(Matrix& to, int n, int k, int format) {
  to.format = format;
  to.n = n;
  to.k = k;
  to.num_panels = round_up(n, kPanel) / kPanel;
  to.num_blocks = round_up(k, kBlock) / kBlock;
  if (is_quantized(format)) {
    to.data_offset = (size_t)round_up(to.num_blocks * kPanel * 2 * (has_min(format) ? 2 : 1), 64);
    to.panel_bytes = to.data_offset + (size_t)to.num_blocks * (is_nibble(format) ? 256 : 512);
  } else {
    to.panel_bytes = (size_t)k * kPanel * (format == F32 ? 4 : 2);
  }
}

bool pack_matrix(Matrix& to, Arena& arena, int source, const void* data, int n, int k, int format,
                 int threads) {
  if (source > SOURCE_F16 && format != natural_format(source)) return false;
  if (source <= SOURCE_F16 && is_quantized(format) && format != U8) return false;
  if (k % shape_of(source).weights) return false;
  lay_out(to, n, k, format);
  to.data = arena.allocate(to.panel_bytes * to.num_panels);
  team().run(threads, [&](int thread) {
    for (int row = (int)((int64_t)n * thread / threads), end = (int)((int64_t)n * (thread + 1) / threads); row < end;
         row++) {
      if (!is_quantized(format)) put_floats(to, row, source, data);
      else
        for (int b = 0; b < to.num_blocks; b++) put_block(to, row, b, read_block(source, data, row, b, k));
    }
  });
  return true;
}

void unpack_row(const Matrix& w, int row, float* out) {
  const int lane = row % kPanel;
  const uint8_t* panel = w.data + (size_t)(row / kPanel) * w.panel_bytes;
  if (!is_quantized(w.format)) {
    for (int i = 0; i < w.k; i++) out[i] = load_float(w.format, panel, (size_t)i * kPanel + lane);
    return;
  }
  const uint16_t* scales = (const uint16_t*)panel;
  for (int i = 0; i < w.k; i++) {
    const int b = i / kBlock, group = i % kBlock / 4, byte = lane * 4 + i % 4;
    const uint8_t* data = block_data(w, row / kPanel, b);
    const int u = is_nibble(w.format) ? (data[64 * (group % 4) + byte] >> (group < 4 ? 0 : 4)) & 15
                                      : data[64 * group + byte];
    const float scale = f16_to_float(scales[b * kPanel + lane]);
    const float min = has_min(w.format) ? f16_to_float(scales[(w.num_blocks + b) * kPanel + lane]) : 0.0f;
    if (has_zeros(w.format)) out[i] = scale * ((float)(w.format == U8Z ? u - 128 : u) + min);
    else if (has_min(w.format)) out[i] = scale * (float)u + min;
    else out[i] = scale * (float)(u - (w.format == U4 ? 8 : 128));
  }
}
