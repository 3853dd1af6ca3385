// Attention on a CPU: tensors to the kernels of ops/cpu/attention/attention.h.
#include <algorithm>
#include <cmath>

#include "espalier/ops/attention/rows_of_problem.h"
#include "espalier/ops/cpu/attention/attention.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

void attention(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  dispatch(out.scalar_type(), [&]<class T>() {
    attention::forward<T>(attention::shape_of(problem), attention::inputs_of<T>(problem), attention::rows_of<T>(out),
                          pointer<accumulator_t<T>>(lse));
  });
}

void add_attention_backward(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                            const at::Tensor& grad_out, const AttentionGradients& gradients) {
  dispatch(out.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    attention::add_backward<T>(attention::shape_of(problem), attention::inputs_of<T>(problem),
                               attention::rows_of<const T>(out), pointer<A>(lse), attention::rows_of<const T>(grad_out),
                               attention::gradients_of<T>(gradients));
  });
}

// Calls body(q, h, lse) for each query row and head, rows shared among threads.
template <class A, class Body>
void for_each_head(const at::Tensor& lse_HQ, Body body) {
  const std::int64_t H = lse_HQ.size(0), Q = lse_HQ.size(1);
  A* const lse = pointer<A>(lse_HQ);
#pragma omp parallel for schedule(static) if (H * Q >= 1024)
  for (std::int64_t q = 0; q < Q; ++q)
    for (std::int64_t h = 0; h < H; ++h) body(q, h, lse[h * Q + q]);
}

void join_sinks(const at::Tensor& sink_H, const at::Tensor& out_Q, const at::Tensor& lse_HQ) {
  const std::int64_t D = out_Q.size(1) / lse_HQ.size(0), stride = out_Q.stride(0);
  dispatch(out_Q.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const T* const sink = pointer<T>(sink_H);
    T* const out = pointer<T>(out_Q);
    for_each_head<A>(lse_HQ, [&](std::int64_t q, std::int64_t h, A& lse) {
      const A s = static_cast<A>(sink[h]), largest = std::max(lse, s);
      const A joined = largest + std::log(std::exp(lse - largest) + std::exp(s - largest)),
              part = std::exp(lse - joined);
      T* const row = out + q * stride + h * D;
      for (std::int64_t d = 0; d < D; ++d) row[d] = T(static_cast<A>(row[d]) * part);
      lse = joined;
    });
  });
}

void add_sinks_backward(const at::Tensor& sink_H, const at::Tensor& out_Q, const at::Tensor& lse_HQ,
                        const at::Tensor& grad_out_Q, const at::Tensor& grad_sink_H) {
  const std::int64_t H = lse_HQ.size(0), Q = lse_HQ.size(1), D = out_Q.size(1) / H;
  dispatch(out_Q.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const T *const sink = pointer<T>(sink_H), *const out = pointer<T>(out_Q), *const grad = pointer<T>(grad_out_Q);
    const A* const lse = pointer<A>(lse_HQ);
    for (std::int64_t h = 0; h < H; ++h) {
      A sum = 0;
      for (std::int64_t q = 0; q < Q; ++q) {
        const T *const o = out + q * out_Q.stride(0) + h * D, *const g = grad + q * grad_out_Q.stride(0) + h * D;
        A dot = 0;
        for (std::int64_t d = 0; d < D; ++d) dot += static_cast<A>(o[d]) * static_cast<A>(g[d]);
        sum += std::exp(static_cast<A>(sink[h]) - lse[h * Q + q]) * dot;
      }
      pointer<A>(grad_sink_H)[h] -= sum;
    }
  });
}

}  // namespace

AttentionOperations attention_operations() {
  return {attention, add_attention_backward, join_sinks, add_sinks_backward};
}

}  // namespace espalier::cpu
