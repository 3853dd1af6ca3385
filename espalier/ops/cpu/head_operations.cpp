// Blocks of logits and a critic's values on a CPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/cpu/head_kernels.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

// The edges of distributions, counted from the block's first edge.
struct BlockEdges {
  explicit BlockEdges(const EdgeBlock& edges)
      : begin(pointer<std::int32_t>(edges.begin_D1)),
        target(pointer<std::int32_t>(edges.target_E)),
        temperature(pointer<double>(edges.temperature_D)) {}
  std::int32_t first(std::int64_t d) const { return begin[d] - begin[0]; }
  std::int32_t last(std::int64_t d) const { return begin[d + 1] - begin[0]; }
  double inverse(std::int64_t d) const { return 1.0 / temperature[d]; }

  const std::int32_t *begin, *target;
  const double* temperature;
};

// The rows and sets of distributions.
struct BlockSets {
  explicit BlockSets(const KeptBlock& kept) : defined(kept.defined()) {
    if (!defined) return;
    row = pointer<std::int32_t>(kept.row_D), first = pointer<std::int32_t>(kept.first_B1);
    begin = pointer<std::int32_t>(kept.begin_D), end = pointer<std::int32_t>(kept.end_D);
    column = pointer<std::int32_t>(kept.column_Z);
  }
  std::int64_t row_of(std::int64_t d) const { return defined ? row[d] : d; }
  bool is_whole(std::int64_t d) const { return !defined || end[d] < 0; }
  std::span<const std::int32_t> columns(std::int64_t d) const {
    return {column + begin[d], static_cast<std::size_t>(end[d] - begin[d])};
  }

  bool defined;
  const std::int32_t *row = nullptr, *first = nullptr, *begin = nullptr, *end = nullptr, *column = nullptr;
};

// The three numbers of each distribution.
struct SetNumbers {
  explicit SetNumbers(const LogitSums& sums)
      : max(pointer<double>(sums.max_D)),
        sum_exp(pointer<double>(sums.sum_exp_D)),
        weighted(pointer<double>(sums.weighted_D)) {}
  HeadRowParts parts(std::int64_t d) const { return {max[d], sum_exp[d], weighted[d]}; }
  HeadRowSums sums(std::int64_t d) const { return {max[d], sum_exp[d], weighted[d]}; }
  void set(std::int64_t d, double m, double s, double w) const { max[d] = m, sum_exp[d] = s, weighted[d] = w; }

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

// A set's logits side by side: the kernels of whole rows then apply to them.
template <class T>
void gather(const T* row, std::span<const std::int32_t> columns, std::vector<T>& out) {
  out.clear();
  for (const std::int32_t column : columns) out.push_back(row[column]);
}

template <class T>
HeadRowParts parts_of_set(const T* row, std::span<const std::int32_t> columns, double inverse) {
  if (columns.empty()) return {-std::numeric_limits<double>::infinity(), 0, 0};
  std::vector<T> logits;
  logits.reserve(columns.size());
  gather(row, columns, logits);
  return compute_row_parts(logits.data(), static_cast<std::int64_t>(logits.size()), inverse);
}

void logit_sums(const EdgeBlock& block, std::int64_t first, const at::Tensor& logits_BV, const LogitSums& sums,
                const at::Tensor& raw_E) {
  const BlockEdges edges(block);
  const BlockSets sets(block.kept);
  const SetNumbers numbers(sums);
  const std::int64_t distributions = sums.max_D.size(0), columns = logits_BV.size(1);
  double* const raw = pointer<double>(raw_E);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    const T* const logits = pointer<T>(logits_BV);
#pragma omp parallel for schedule(static) if (distributions * columns >= kParallelLogits)
    for (std::int64_t d = 0; d < distributions; ++d) {
      const T* const row = logits + sets.row_of(d) * columns;
      const HeadRowParts parts = sets.is_whole(d) ? compute_row_parts(row, columns, edges.inverse(d))
                                                  : parts_of_set(row, sets.columns(d), edges.inverse(d));
      numbers.set(d, parts.max_raw, parts.sum_exp, parts.sum_weighted);
    }
    for (std::int64_t d = 0; d < distributions; ++d)
      for (std::int32_t e = edges.first(d); e < edges.last(d); ++e) {
        const std::int64_t column = edges.target[e] - first;
        raw[e] = column >= 0 && column < columns ? static_cast<double>(logits[sets.row_of(d) * columns + column]) : 0;
      }
  });
}

void raise_maximum(const EdgeBlock& block, const at::Tensor& max_D, const LogitSums& sums) {
  const BlockEdges edges(block);
  const SetNumbers numbers(sums);
  const double* const maximum = pointer<double>(max_D);
  for (std::int64_t d = 0; d < max_D.size(0); ++d) {
    const HeadRowParts parts = with_maximum(numbers.parts(d), maximum[d], edges.inverse(d));
    numbers.set(d, parts.max_raw, parts.sum_exp, parts.sum_weighted);
  }
}

void score_edges(const EdgeBlock& block, const at::Tensor& raw_E, const LogitSums& sums, const at::Tensor& logprob_E,
                 const at::Tensor& entropy_E) {
  const BlockEdges edges(block);
  const SetNumbers numbers(sums);
  const double* const raw = pointer<double>(raw_E);
  double *const logprob = pointer<double>(logprob_E), *const entropy = pointer<double>(entropy_E);
  for (std::int64_t d = 0; d < sums.max_D.size(0); ++d) {
    const HeadRowSums of_set = row_sums_of(numbers.parts(d));
    numbers.set(d, of_set.max_raw, of_set.log_sum, of_set.entropy);
    for (std::int32_t e = edges.first(d); e < edges.last(d); ++e) {
      logprob[e] = token_logprob(raw[e], edges.inverse(d), of_set);
      entropy[e] = of_set.entropy;
    }
  }
}

// The gradients of one block, for one type of logits.
template <class T>
struct GradientRows {
  const EdgeBlock& block;
  const BlockEdges edges;
  const BlockSets sets;
  const SetNumbers numbers;
  const double *grad_logprob, *grad_entropy;
  std::int64_t first, columns;

  // Turns the logits of d (a whole row, or the logits of its set side by side) into what d adds to their gradients.
  // place_of(token): the place of an edge's token among them; -1: another rank has it.
  template <class PlaceOf>
  void turn(std::int64_t d, T* raw, std::int64_t n, const PlaceOf& place_of) const {
    const std::vector<T> shaped(raw, raw + (block.shape.is_plain() ? 0 : n));
    const double inverse = edges.inverse(d);
    double logprob_sum = 0, entropy_sum = 0;
    for (std::int32_t e = edges.first(d); e < edges.last(d); ++e)
      logprob_sum += grad_logprob[e], entropy_sum += grad_entropy[e];
    compute_row_gradient(raw, n, inverse, numbers.sums(d), logprob_sum, entropy_sum);
    for (std::int32_t e = edges.first(d); e < edges.last(d); ++e) {
      const std::int64_t place = place_of(edges.target[e] - first);
      if (place >= 0) raw[place] += static_cast<T>(grad_logprob[e] * inverse);
    }
    if (!block.shape.is_plain()) through_shape(block.shape, n, shaped.data(), raw);
  }
  void turn_whole(std::int64_t d, T* row) const {
    turn(d, row, columns, [this](std::int64_t column) { return column < columns ? column : -1; });
  }

  // The gradients of the sets are found before the row is overwritten, and added to it afterwards.
  void turn_row_of_sets(std::int64_t b, T* row) const {
    const std::int32_t begin = sets.first[b], end = sets.first[b + 1];
    std::vector<std::vector<T>> of_set(static_cast<std::size_t>(end - begin));
    const bool has_whole = begin < end && sets.is_whole(begin);
    for (std::int32_t d = begin + has_whole; d < end; ++d) {
      const auto kept = sets.columns(d);
      std::vector<T>& grad = of_set[static_cast<std::size_t>(d - begin)];
      gather(row, kept, grad);
      turn(d, grad.data(), static_cast<std::int64_t>(kept.size()), [&](std::int64_t column) -> std::int64_t {
        const auto at = std::ranges::lower_bound(kept, column);
        return at != kept.end() && *at == column ? at - kept.begin() : -1;
      });
    }
    has_whole ? turn_whole(begin, row) : static_cast<void>(std::fill_n(row, columns, T(0)));
    for (std::int32_t d = begin + has_whole; d < end; ++d) {
      const auto kept = sets.columns(d);
      const std::vector<T>& grad = of_set[static_cast<std::size_t>(d - begin)];
      for (std::size_t i = 0; i < kept.size(); ++i) row[kept[i]] += grad[i];
    }
  }
};

void logit_gradients(const EdgeBlock& block, std::int64_t first, const LogitSums& sums,
                     const at::Tensor& grad_logprob_E, const at::Tensor& grad_entropy_E, const at::Tensor& logits_BV) {
  const std::int64_t rows = logits_BV.size(0), columns = logits_BV.size(1);
  dispatch_sums(logits_BV.scalar_type(), [&]<class T>() {
    T* const logits = pointer<T>(logits_BV);
    const GradientRows<T> of{block,
                             BlockEdges(block),
                             BlockSets(block.kept),
                             SetNumbers(sums),
                             pointer<double>(grad_logprob_E),
                             pointer<double>(grad_entropy_E),
                             first,
                             columns};
#pragma omp parallel for schedule(static) if (rows * columns >= kParallelLogits)
    for (std::int64_t row = 0; row < rows; ++row) {
      T* const raw = logits + row * columns;
      of.sets.defined ? of.turn_row_of_sets(row, raw) : of.turn_whole(row, raw);
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
