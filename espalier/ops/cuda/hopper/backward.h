// The two kernels of the backward: gradients of queries, and gradients of keys and values. Each makes the scores and
// their slopes again, so that every sum has one owner and one order, and no sums pass through memory.
#pragma once

#include "espalier/ops/cuda/hopper/attention.h"

namespace espalier::cuda::hopper {

using attention::Rows;
using attention::Shape;

// Queries of a tile that passes by keys. Windows and caps take registers, and heads of 256 elements shared memory.
template <int D, bool rules>
inline constexpr int kPassingQueries = D == 256 || (D > 128 && rules) ? 32 : 64;
inline constexpr int kMostPassingQueries = 64;

// Numbers of queries [heads, tiles x kMostPassingQueries]: log-sum-exps in units of ln 2, and delta (attention.h). Rows
// behind the last query have +inf and 0, so that all their weights are 0.
struct QueryNumbers {
  const float *lse_log2, *delta;
  std::int64_t padded;  // rows of a head
};

// Sums of gradients of queries, of one region of keys, before the scale: [heads, tiles, 2 halves of a head's elements],
// each [64, 64] in the order of a warpgroup's registers, four numbers of each thread at a time.
inline constexpr int kSumQueries = 64, kSumBytes = kSumQueries * 128 * 4;  // of a tile
struct QuerySums {
  float* data = nullptr;  // null: there are none
  int* turns = nullptr;   // [heads, tiles] how many blocks have added
  int tiles = 0;
  int before = 0;  // blocks of launches before this one
};

// Overwrites the gradients of queries. The sums, where there are any, hold the part of the path; then the kernel goes
// over own keys alone.
void backward_queries(const Shape& shape, const attention::Inputs<bfloat16>& in, const QueryNumbers& numbers,
                      Rows<const bfloat16> grad_out, const QuerySums& sums, Rows<bfloat16> grad_q);
// Adds to the gradients of keys and values of the path, or of the own rows.
void add_backward_keys(const Shape& shape, const attention::Inputs<bfloat16>& in, const QueryNumbers& numbers,
                       Rows<const bfloat16> grad_out, bool path, Rows<float> grad_k, Rows<float> grad_v);

// True if blocks of the path's keys can add to the gradients of queries in turn: heads of 128 elements without window
// and cap, no more blocks than tiles of queries, and a GPU that holds the blocks at a time.
bool adds_query_sums(const Shape& shape);
// Adds to the gradients of the path's keys and values, and to the sums, which begin as zeros.
void add_backward_path(const Shape& shape, const attention::Inputs<bfloat16>& in, const QueryNumbers& numbers,
                       Rows<const bfloat16> grad_out, QuerySums sums, Rows<float> grad_k, Rows<float> grad_v);

}  // namespace espalier::cuda::hopper
