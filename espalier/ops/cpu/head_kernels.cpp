// One row of logits, for one instruction set. Contract: head_kernels.h.
#include "espalier/ops/cpu/head_kernels.h"

#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {

namespace {

constexpr std::int64_t kRun = 1024;  // values whose maximum is found and whose terms are added while they are in L1

template <class T>
T run_maximum(const T* raw, std::int64_t n) {
  Vector<T> top = broadcast(raw[0]);
  std::int64_t v = 0;
  for (; v + kLanes<T> <= n; v += kLanes<T>) top = max(load(raw + v), top);
  T maximum = max_of(top);
  for (; v < n; ++v) maximum = raw[v] > maximum ? raw[v] : maximum;
  return maximum;
}

template <class T>
HeadRowParts row_parts(const T* raw, std::int64_t n, double inverse_temperature) {
  const Vector<T> inverse = broadcast(static_cast<T>(inverse_temperature));
  double maximum = static_cast<double>(raw[0]), sum_exp = 0, sum_weighted = 0;
  for (std::int64_t begin = 0; begin < n; begin += kRun) {
    const std::int64_t count = n - begin < kRun ? n - begin : kRun;
    const double top = static_cast<double>(run_maximum(raw + begin, count));
    if (top > maximum) {  // with d = y_old - y_new: sum e^(y-d) = e^-d sum e^y, sum (y-d) e^(y-d) likewise
      const double shift = (top - maximum) * inverse_temperature, scale = __builtin_exp(-shift);
      sum_weighted = scale == 0 ? 0 : scale * fma(-shift, sum_exp, sum_weighted);
      sum_exp *= scale;
      maximum = top;
    }
    const Vector<T> offset = broadcast(static_cast<T>(maximum));
    RowSum<T> run_exp, run_weighted;
    const auto add = [&](int part, std::int64_t v, int lanes) {
      Vector<T> y = (load_some(raw + v, lanes) - offset) * inverse, e;
      if (lanes == kLanes<T>) {
        e = exp(y);
      } else {
        const IntegerVector<T> inside = lane_numbers(T{}) < broadcast(static_cast<T>(lanes));
        y = inside ? y : Vector<T>{};
        e = inside ? exp(y) : Vector<T>{};
      }
      run_exp.part[part] += e;
      run_weighted.part[part] = fma(e, y, run_weighted.part[part]);
    };
    for_row_parts<T>(begin, begin + count, add);
    sum_exp += static_cast<double>(run_exp.total());
    sum_weighted += static_cast<double>(run_weighted.total());
  }
  return {maximum, sum_exp, sum_weighted};
}

template <class T>
void row_gradient(T* raw, std::int64_t n, double inverse_temperature, const HeadRowSums& sums, double grad_logprob,
                  double grad_entropy) {
  const Vector<T> inverse = broadcast(static_cast<T>(inverse_temperature));
  const Vector<T> offset = broadcast(static_cast<T>(sums.max_raw)), log_sum = broadcast(static_cast<T>(sums.log_sum));
  const Vector<T> constant =
      broadcast(static_cast<T>(-inverse_temperature * (grad_logprob + grad_entropy * sums.entropy)));
  const Vector<T> slope = broadcast(static_cast<T>(-inverse_temperature * grad_entropy));
  for_lanes<T>(n, [&](std::int64_t v, int count) {
    const Vector<T> log_p = fma(load_some(raw + v, count) - offset, inverse, -log_sum);
    store_some(raw + v, exp(log_p) * fma(slope, log_p, constant), count);
  });
}

}  // namespace

HeadRowParts row_parts_float(const float* raw, std::int64_t n, double inverse) { return row_parts(raw, n, inverse); }
HeadRowParts row_parts_double(const double* raw, std::int64_t n, double inverse) { return row_parts(raw, n, inverse); }
void row_gradient_float(float* raw, std::int64_t n, double inverse, const HeadRowSums& sums, double grad_logprob,
                        double grad_entropy) {
  row_gradient(raw, n, inverse, sums, grad_logprob, grad_entropy);
}
void row_gradient_double(double* raw, std::int64_t n, double inverse, const HeadRowSums& sums, double grad_logprob,
                         double grad_entropy) {
  row_gradient(raw, n, inverse, sums, grad_logprob, grad_entropy);
}

}  // namespace espalier::ESPALIER_SIMD
