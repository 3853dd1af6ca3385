#include "espalier/ops/cpu/value_head.h"

#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/cpu/dispatch.h"

namespace espalier {
namespace {

constexpr std::int64_t kParallelElements = 1 << 15;  // less is done before threads have woken

void check(const ValueHeadProblem& problem, std::size_t series) {
  const at::Tensor& hidden = problem.hidden_OM;
  ESPALIER_INTERNAL(hidden.is_contiguous() && problem.weight_M.is_contiguous() &&
                        hidden.size(1) == problem.weight_M.numel() && problem.bias_1.numel() == 1 &&
                        hidden.scalar_type() == problem.weight_M.scalar_type(),
                    "hidden ", hidden.sizes(), ", weight ", problem.weight_M.sizes());
  ESPALIER_INTERNAL_EQ(static_cast<std::int64_t>(series), hidden.size(0));
}

}  // namespace

void value_head_forward(const ValueHeadProblem& problem, std::span<double> value) {
  if (value.empty()) return;
  check(problem, value.size());
  const std::int64_t O = problem.hidden_OM.size(0), M = problem.hidden_OM.size(1);
  dispatch(problem.hidden_OM.scalar_type(), [&]<class T>() {
    const T *hidden = pointer<T>(problem.hidden_OM), *weight = pointer<T>(problem.weight_M);
    const double bias = static_cast<double>(*pointer<T>(problem.bias_1));
#pragma omp parallel for schedule(static) if (O * M >= kParallelElements)
    for (std::int64_t o = 0; o < O; ++o) {
      double sum = 0;
      for (std::int64_t m = 0; m < M; ++m)
        sum += static_cast<double>(hidden[o * M + m]) * static_cast<double>(weight[m]);
      value[static_cast<std::size_t>(o)] = sum + bias;
    }
  });
}

void value_head_backward(const ValueHeadProblem& problem, std::span<const double> grad_value,
                         const ValueHeadGradients& out) {
  if (grad_value.empty()) return;
  check(problem, grad_value.size());
  const std::int64_t O = problem.hidden_OM.size(0), M = problem.hidden_OM.size(1);
  dispatch(problem.hidden_OM.scalar_type(), [&]<class T>() {
    using Sum = accumulator_t<T>;
    const T *hidden = pointer<T>(problem.hidden_OM), *weight = pointer<T>(problem.weight_M);
    T* grad_hidden = pointer<T>(out.grad_hidden_OM);
#pragma omp parallel for schedule(static) if (O * M >= kParallelElements)
    for (std::int64_t o = 0; o < O; ++o)
      for (std::int64_t m = 0; m < M; ++m)
        grad_hidden[o * M + m] =
            static_cast<T>(grad_value[static_cast<std::size_t>(o)] * static_cast<double>(weight[m]));
    std::vector<double> sum(static_cast<std::size_t>(M));
    double bias = 0;
    for (std::int64_t o = 0; o < O; ++o) {
      const double gradient = grad_value[static_cast<std::size_t>(o)];
      bias += gradient;
      for (std::int64_t m = 0; m < M; ++m)
        sum[static_cast<std::size_t>(m)] += gradient * static_cast<double>(hidden[o * M + m]);
    }
    Sum* grad_weight = pointer<Sum>(out.grad_weight_M);
    for (std::int64_t m = 0; m < M; ++m) grad_weight[m] += static_cast<Sum>(sum[static_cast<std::size_t>(m)]);
    *pointer<Sum>(out.grad_bias_1) += static_cast<Sum>(bias);
  });
}

}  // namespace espalier
