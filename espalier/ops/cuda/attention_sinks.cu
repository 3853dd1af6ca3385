// Sinks of attention: a logit per head that joins the softmax of each row and has no value. A warp has a row of a head;
// for the gradient a block has a head.
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

using attention::Rows;
using attention::Shape;

constexpr int kWarps = 4, kThreads = kWarps * 32, kSumThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    join_sinks_kernel(Shape shape, const T* sink_H, Rows<T> out, accumulator_t<T>* lse_HQ) {
  using A = accumulator_t<T>;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= shape.query_rows * shape.heads) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t query = item / shape.heads, head = item % shape.heads, at = head * shape.query_rows + query;
  const A lse = lse_HQ[at], sink = widened(sink_H[head]), largest = lse > sink ? lse : sink;
  const A joined = largest + std::log(std::exp(lse - largest) + std::exp(sink - largest));
  const A part = std::exp(lse - joined);
  T* const row = out.data + query * out.stride + head * shape.value_dim;
  for (std::int64_t d = lane; d < shape.value_dim; d += 32) row[d] = narrowed<T>(widened(row[d]) * part);
  __syncwarp();  // all lanes have read the sum
  if (lane == 0) lse_HQ[at] = joined;
}

template <class T>
__global__ void __launch_bounds__(kSumThreads)
    sinks_backward_kernel(std::int64_t queries, const T* sink_H, const accumulator_t<T>* lse_HQ,
                          const accumulator_t<T>* delta_HQ, accumulator_t<T>* grad_sink_H) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const std::int64_t first = blockIdx.x * queries;
  const A sink = widened(sink_H[blockIdx.x]);
  A sum = 0;
  for (std::int64_t q = threadIdx.x; q < queries; q += kSumThreads)
    sum += std::exp(sink - lse_HQ[first + q]) * delta_HQ[first + q];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) grad_sink_H[blockIdx.x] -= sum;
}

}  // namespace

template <class T>
void join_sinks(const Shape& shape, const T* sink_H, Rows<T> out, accumulator_t<T>* lse_HQ) {
  launch(join_sinks_kernel<T>, {ceil_div(shape.query_rows * shape.heads, kWarps)}, kThreads, 0, shape, sink_H, out,
         lse_HQ);
}

template <class T>
void add_sinks_backward(const Shape& shape, const T* sink_H, Rows<const T> out, const accumulator_t<T>* lse_HQ,
                        Rows<const T> grad_out, accumulator_t<T>* grad_sink_H) {
  const Scratch<accumulator_t<T>> delta(shape.heads * shape.query_rows);
  attention_delta(shape, out, grad_out, delta.get());
  launch(sinks_backward_kernel<T>, {shape.heads}, kSumThreads, 0, shape.query_rows, sink_H, lse_HQ, delta.get(),
         grad_sink_H);
}

#define ESPALIER_INSTANTIATE(T)                                                                                   \
  template void join_sinks(const Shape&, const T*, Rows<T>, accumulator_t<T>*);                                   \
  template void add_sinks_backward(const Shape&, const T*, Rows<const T>, const accumulator_t<T>*, Rows<const T>, \
                                   accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
