// From a matrix as a file has it (row-major floats, or GGUF blocks) to panels.
#pragma once
#include "arena.h"
#include "kernels.h"

// Where a matrix comes from. The float kinds equal the formats of kernels.h; the others are GGUF's blocks.
enum Source {
  SOURCE_F32 = 0, SOURCE_BF16 = 1, SOURCE_F16 = 2,
  SOURCE_Q4_0 = 10, SOURCE_Q4_1 = 11, SOURCE_Q5_0 = 12, SOURCE_Q5_1 = 13, SOURCE_Q8_0 = 14,
  SOURCE_Q4_K = 15, SOURCE_Q5_K = 16, SOURCE_Q6_K = 17,
  SOURCE_U4Z = 20, SOURCE_U8Z = 21,  // ours: f16 scale, f16 zero, then as Q4_0 and (unsigned) Q8_0
};

// The panel format that holds a source exactly (Q4_K and Q5_K: up to the rounding of a scale to f16; Q6_K: quantized
// again as U8, because it has two scales per 32 weights).
int natural_format(int source);
// Float sources go to any float format or to U8; GGUF blocks only to their natural format. False: not possible.
// Sizes and offsets of a matrix in this format; its data is not set.
void lay_out(Matrix& to, int n, int k, int format);
bool pack_matrix(Matrix& to, Arena& arena, int source, const void* data, int n, int k, int format,
                 int threads);
// Row `row` of the matrix as floats: an embedding lookup.
void unpack_row(const Matrix& w, int row, float* out);
