// Blocks of logits and a critic's values on a CPU.
#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/head_kernels.h"
#include "espalier/ops/cpu/operations.h"

namespace espalier::cpu {
namespace {

// Calls visit(row, e) for the edges of rows [begin, end), e counted from the block's first edge.
struct RowEdges {
  explicit RowEdges(const EdgeBlock& edges)
      : begin(pointer<std::int32_t>(edges.begin_B1)),
        target(pointer<std::int32_t>(edges.target_E)),
        temperature(pointer<double>(edges.temperature_B)) {}
  std::int32_t first(std::int64_t row) const { return begin[row] - begin[0]; }
  std::int32_t last(std::int64_t row) const { return begin[row + 1] - begin[0]; }
  double inverse(std::int64_t row) const { return 1.0 / temperature[row]; }

  const std::int32_t *begin, *target;
  const double* temperature;
};

HeadRowSums* sums_in(const at::Tensor& sums_B3) {
  static_assert(sizeof(HeadRowSums) == 3 * sizeof(double));
  return reinterpret_cast<HeadRowSums*>(pointer<double>(sums_B3));
}

void score_logits(const EdgeBlock& block, const at::Tensor& logits_BV, const at::Tensor& sums_B3,
                  const at::Tensor& logprob_E, const at::Tensor& entropy_E) {
  const RowEdges edges(block);
  const std::int64_t rows = logits_BV.size(0), vocabulary = logits_BV.size(1);
  HeadRowSums* const sums = sums_in(sums_B3);
  double *const logprob = pointer<double>(logprob_E), *const entropy = pointer<double>(entropy_E);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    const T* const logits = pointer<T>(logits_BV);
#pragma omp parallel for schedule(static) if (rows * vocabulary >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row)
      sums[row] = compute_row_sums(logits + row * vocabulary, vocabulary, edges.inverse(row));
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int32_t e = edges.first(row); e < edges.last(row); ++e) {
        const double raw = static_cast<double>(logits[row * vocabulary + edges.target[e]]);
        logprob[e] = token_logprob(raw, edges.inverse(row), sums[row]);
        entropy[e] = sums[row].entropy;
      }
  });
}

void logit_gradients(const EdgeBlock& block, const at::Tensor& sums_B3, const at::Tensor& grad_logprob_E,
                     const at::Tensor& grad_entropy_E, const at::Tensor& logits_BV) {
  const RowEdges edges(block);
  const std::int64_t rows = logits_BV.size(0), vocabulary = logits_BV.size(1);
  const HeadRowSums* const sums = sums_in(sums_B3);
  const double *const grad_logprob = pointer<double>(grad_logprob_E), *const grad_entropy =
                                                                          pointer<double>(grad_entropy_E);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    T* const logits = pointer<T>(logits_BV);
#pragma omp parallel for schedule(static) if (rows * vocabulary >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row) {
      T* raw = logits + row * vocabulary;
      const double inverse = edges.inverse(row);
      double logprob_sum = 0, entropy_sum = 0;
      for (std::int32_t e = edges.first(row); e < edges.last(row); ++e)
        logprob_sum += grad_logprob[e], entropy_sum += grad_entropy[e];
      compute_row_gradient(raw, vocabulary, inverse, sums[row], logprob_sum, entropy_sum);
      for (std::int32_t e = edges.first(row); e < edges.last(row); ++e)
        raw[edges.target[e]] += static_cast<T>(grad_logprob[e] * inverse);
    }
  });
}

constexpr std::int64_t kParallelElements = 1 << 15;  // of a value head; less is done before threads have woken

void value(const at::Tensor& hidden_OM, const at::Tensor& weight_M, const at::Tensor& bias_1,
           const at::Tensor& value_O) {
  const std::int64_t O = hidden_OM.size(0), M = hidden_OM.size(1);
  double* const values = pointer<double>(value_O);
  dispatch(hidden_OM.scalar_type(), [&]<class T>() {
    const T *hidden = pointer<T>(hidden_OM), *weight = pointer<T>(weight_M);
    const double bias = static_cast<double>(*pointer<T>(bias_1));
#pragma omp parallel for schedule(static) if (O * M >= kParallelElements)
    for (std::int64_t o = 0; o < O; ++o) {
      double sum = 0;
      for (std::int64_t m = 0; m < M; ++m)
        sum += static_cast<double>(hidden[o * M + m]) * static_cast<double>(weight[m]);
      values[o] = sum + bias;
    }
  });
}

void add_value_backward(const at::Tensor& hidden_OM, const at::Tensor& weight_M, const at::Tensor& grad_value_O,
                        const at::Tensor& grad_hidden_OM, const at::Tensor& grad_weight_M,
                        const at::Tensor& grad_bias_1) {
  const std::int64_t O = hidden_OM.size(0), M = hidden_OM.size(1);
  const double* const grad_value = pointer<double>(grad_value_O);
  dispatch(hidden_OM.scalar_type(), [&]<class T>() {
    using Sum = accumulator_t<T>;
    const T *hidden = pointer<T>(hidden_OM), *weight = pointer<T>(weight_M);
    T* grad_hidden = pointer<T>(grad_hidden_OM);
#pragma omp parallel for schedule(static) if (O * M >= kParallelElements)
    for (std::int64_t o = 0; o < O; ++o)
      for (std::int64_t m = 0; m < M; ++m)
        grad_hidden[o * M + m] = static_cast<T>(grad_value[o] * static_cast<double>(weight[m]));
    std::vector<double> sum(static_cast<std::size_t>(M));
    double bias = 0;
    for (std::int64_t o = 0; o < O; ++o) {
      bias += grad_value[o];
      for (std::int64_t m = 0; m < M; ++m)
        sum[static_cast<std::size_t>(m)] += grad_value[o] * static_cast<double>(hidden[o * M + m]);
    }
    Sum* grad_weight = pointer<Sum>(grad_weight_M);
    for (std::int64_t m = 0; m < M; ++m) grad_weight[m] += static_cast<Sum>(sum[static_cast<std::size_t>(m)]);
    *pointer<Sum>(grad_bias_1) += static_cast<Sum>(bias);
  });
}

}  // namespace

HeadOperations head_operations() { return {score_logits, logit_gradients, value, add_value_backward}; }

}  // namespace espalier::cpu
