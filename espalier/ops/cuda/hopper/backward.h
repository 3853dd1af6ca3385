// The two kernels of the backward: gradients of queries, and gradients of keys and values. Each makes the scores and
// their slopes again, so that every sum has one owner and one order, and no sums pass through memory.
#pragma once

#include "espalier/ops/cuda/hopper/attention.h"

namespace espalier::cuda::hopper {

using attention::Rows;
using attention::Shape;

inline constexpr int kPassingQueries = 64;  // of a tile that passes by keys

// Numbers of queries [heads, tiles x kPassingQueries]: log-sum-exps in units of ln 2, and delta (attention.h). Rows
// behind the last query have +inf and 0, so that all their weights are 0.
struct QueryNumbers {
  const float *lse_log2, *delta;
  std::int64_t padded;  // rows of a head
};

// Overwrites the gradients of queries.
void backward_queries(const Shape& shape, const attention::Inputs<bfloat16>& in, const QueryNumbers& numbers,
                      Rows<const bfloat16> grad_out, Rows<bfloat16> grad_q);
// Adds to the gradients of keys and values of the path, or of the own rows.
void add_backward_keys(const Shape& shape, const attention::Inputs<bfloat16>& in, const QueryNumbers& numbers,
                       Rows<const bfloat16> grad_out, bool path, Rows<float> grad_k, Rows<float> grad_v);

// Calls body with the head size, and whether there is a window or a cap.
template <class Body>
void with_backward_sizes(const Shape& shape, Body&& body) {
  const auto with_rules = [&]<int D>() {
    shape.window > 0 || shape.soft_cap > 0 ? body.template operator()<D, true>() : body.template operator()<D, false>();
  };
  switch (shape.head_dim) {
    case 64:
      return with_rules.template operator()<64>();
    case 96:
      return with_rules.template operator()<96>();
    default:
      return with_rules.template operator()<128>();
  }
}

}  // namespace espalier::cuda::hopper
