// Backward: the numbers of queries, and the order of its kernels.
#include "espalier/ops/cuda/hopper/backward.h"

#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/hopper/tile_facts.h"

namespace espalier::cuda::hopper {
namespace {

constexpr int kThreads = 256;

// Log-sum-exps in units of ln 2, and delta, in rows of whole tiles.
__global__ void __launch_bounds__(kThreads)
    query_numbers_kernel(std::int64_t queries, std::int64_t padded, const float* lse_HQ, const float* delta_HQ,
                         float* lse_log2, float* delta) {
  const std::int64_t query = grid_thread(), head = blockIdx.y;
  if (query >= padded) return;
  const bool inside = query < queries;
  lse_log2[head * padded + query] = inside ? lse_HQ[head * queries + query] * kLog2E : INFINITY;
  delta[head * padded + query] = inside ? delta_HQ[head * queries + query] : 0.f;
}

}  // namespace

bool takes_backward(const Shape& shape, const attention::Inputs<bfloat16>& in, Rows<const bfloat16> grad_out,
                    Rows<const bfloat16> grad_q) {
  return takes_forward(shape, in, grad_q) && takes_copies(grad_out);
}

void add_backward(const Shape& shape, const attention::Inputs<bfloat16>& in, Rows<const bfloat16> out,
                  const float* lse_HQ, Rows<const bfloat16> grad_out, const attention::Gradients<bfloat16>& grads,
                  bool in_turn) {
  if (shape.query_rows == 0) return;
  const std::int64_t Q = shape.query_rows, H = shape.heads,
                     padded = ceil_div(Q, kMostPassingQueries) * kMostPassingQueries;
  const Scratch<float> of_rows(H * Q), of_tiles(2 * H * padded);
  attention_delta(shape, out, grad_out, of_rows.get());
  float *const lse_log2 = of_tiles.get(), *const delta = lse_log2 + H * padded;
  launch(query_numbers_kernel, {ceil_div(padded, kThreads), H}, kThreads, 0, Q, padded, lse_HQ, of_rows.get(), lse_log2,
         delta);
  const QueryNumbers numbers{lse_log2, delta, padded};
  if (in_turn && adds_query_sums(shape)) {
    const std::int64_t tiles = padded / kSumQueries, bytes = H * tiles * kSumBytes;
    const Scratch<float> of_queries(bytes / 4);
    const Scratch<int> turns(H * tiles);
    fill_zero(of_queries.get(), static_cast<std::size_t>(bytes));
    fill_zero(turns.get(), static_cast<std::size_t>(H * tiles) * sizeof(int));
    const QuerySums sums{of_queries.get(), turns.get(), static_cast<int>(tiles)};
    add_backward_path(shape, in, numbers, grad_out, sums, grads.path_k, grads.path_v);
    backward_queries(shape, in, numbers, grad_out, sums, grads.q);
  } else {
    backward_queries(shape, in, numbers, grad_out, {}, grads.q);
    add_backward_keys(shape, in, numbers, grad_out, true, grads.path_k, grads.path_v);
  }
  add_backward_keys(shape, in, numbers, grad_out, false, grads.own_k, grads.own_v);
}

}  // namespace espalier::cuda::hopper
