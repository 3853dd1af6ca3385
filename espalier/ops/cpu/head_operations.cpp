// Blocks of logits and a critic's values on a CPU.
#include <cmath>
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

// The three numbers of each row.
struct RowNumbers {
  explicit RowNumbers(const LogitSums& sums)
      : max(pointer<double>(sums.max_B)),
        sum_exp(pointer<double>(sums.sum_exp_B)),
        weighted(pointer<double>(sums.weighted_B)) {}
  HeadRowParts parts(std::int64_t row) const { return {max[row], sum_exp[row], weighted[row]}; }
  HeadRowSums sums(std::int64_t row) const { return {max[row], sum_exp[row], weighted[row]}; }
  void set(std::int64_t row, double m, double s, double w) const { max[row] = m, sum_exp[row] = s, weighted[row] = w; }

  double *max, *sum_exp, *weighted;
};

void shape_logits(const LogitShape& shape, const at::Tensor& logits_BV) {
  const std::int64_t rows = logits_BV.size(0), columns = logits_BV.size(1), stride = logits_BV.stride(0);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    const T scale = static_cast<T>(shape.scale), cap = static_cast<T>(shape.cap);
#pragma omp parallel for schedule(static) if (rows * columns >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row) {
      T* const z = pointer<T>(logits_BV) + row * stride;
      for (std::int64_t v = 0; v < columns; ++v) z[v] *= scale;
      for (std::int64_t v = 0; cap > 0 && v < columns; ++v) z[v] = cap * std::tanh(z[v] / cap);
    }
  });
}

// The gradient by shaped logits becomes that by raw ones; `shaped` is what the logits were.
template <class T>
void through_shape(const LogitShape& shape, std::int64_t columns, const T* shaped, T* grad) {
  const T scale = static_cast<T>(shape.scale), cap = static_cast<T>(shape.cap);
  for (std::int64_t v = 0; v < columns; ++v) {
    const T t = cap > 0 ? shaped[v] / cap : 0;
    grad[v] *= scale * (1 - t * t);
  }
}

void logit_sums(const EdgeBlock& block, std::int64_t first, const at::Tensor& logits_BV, const LogitSums& sums,
                const at::Tensor& raw_E) {
  const RowEdges edges(block);
  const RowNumbers numbers(sums);
  const std::int64_t rows = logits_BV.size(0), columns = logits_BV.size(1);
  double* const raw = pointer<double>(raw_E);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    const T* const logits = pointer<T>(logits_BV);
#pragma omp parallel for schedule(static) if (rows * columns >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row) {
      const HeadRowParts parts = compute_row_parts(logits + row * columns, columns, edges.inverse(row));
      numbers.set(row, parts.max_raw, parts.sum_exp, parts.sum_weighted);
    }
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int32_t e = edges.first(row); e < edges.last(row); ++e) {
        const std::int64_t column = edges.target[e] - first;
        raw[e] = column >= 0 && column < columns ? static_cast<double>(logits[row * columns + column]) : 0;
      }
  });
}

void raise_maximum(const EdgeBlock& block, const at::Tensor& max_B, const LogitSums& sums) {
  const RowEdges edges(block);
  const RowNumbers numbers(sums);
  const double* const maximum = pointer<double>(max_B);
  for (std::int64_t row = 0; row < max_B.size(0); ++row) {
    const HeadRowParts parts = with_maximum(numbers.parts(row), maximum[row], edges.inverse(row));
    numbers.set(row, parts.max_raw, parts.sum_exp, parts.sum_weighted);
  }
}

void score_edges(const EdgeBlock& block, const at::Tensor& raw_E, const LogitSums& sums, const at::Tensor& logprob_E,
                 const at::Tensor& entropy_E) {
  const RowEdges edges(block);
  const RowNumbers numbers(sums);
  const double* const raw = pointer<double>(raw_E);
  double *const logprob = pointer<double>(logprob_E), *const entropy = pointer<double>(entropy_E);
  for (std::int64_t row = 0; row < sums.max_B.size(0); ++row) {
    const HeadRowSums of_row = row_sums_of(numbers.parts(row));
    numbers.set(row, of_row.max_raw, of_row.log_sum, of_row.entropy);
    for (std::int32_t e = edges.first(row); e < edges.last(row); ++e) {
      logprob[e] = token_logprob(raw[e], edges.inverse(row), of_row);
      entropy[e] = of_row.entropy;
    }
  }
}

void logit_gradients(const EdgeBlock& block, std::int64_t first, const LogitSums& sums,
                     const at::Tensor& grad_logprob_E, const at::Tensor& grad_entropy_E, const at::Tensor& logits_BV) {
  const RowEdges edges(block);
  const RowNumbers numbers(sums);
  const std::int64_t rows = logits_BV.size(0), columns = logits_BV.size(1);
  const double *const grad_logprob = pointer<double>(grad_logprob_E), *const grad_entropy =
                                                                          pointer<double>(grad_entropy_E);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    T* const logits = pointer<T>(logits_BV);
#pragma omp parallel for schedule(static) if (rows * columns >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row) {
      T* raw = logits + row * columns;
      const std::vector<T> shaped(raw, raw + (block.shape.is_plain() ? 0 : columns));
      const double inverse = edges.inverse(row);
      double logprob_sum = 0, entropy_sum = 0;
      for (std::int32_t e = edges.first(row); e < edges.last(row); ++e)
        logprob_sum += grad_logprob[e], entropy_sum += grad_entropy[e];
      compute_row_gradient(raw, columns, inverse, numbers.sums(row), logprob_sum, entropy_sum);
      for (std::int32_t e = edges.first(row); e < edges.last(row); ++e) {
        const std::int64_t column = edges.target[e] - first;
        if (column >= 0 && column < columns) raw[column] += static_cast<T>(grad_logprob[e] * inverse);
      }
      if (!block.shape.is_plain()) through_shape(block.shape, columns, shaped.data(), raw);
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

HeadOperations head_operations() {
  return {shape_logits, logit_sums, raise_maximum, score_edges, logit_gradients, value, add_value_backward};
}

}  // namespace espalier::cpu
