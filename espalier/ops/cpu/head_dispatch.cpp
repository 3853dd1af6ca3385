// Picks the instruction set of the head's row kernels at run time.
#include "espalier/ops/cpu/head_kernels.h"

#include "espalier/base/instruction_set.h"

namespace espalier {

#define ESPALIER_HEAD_KERNELS(set)                                                                                    \
  namespace set {                                                                                                     \
  HeadRowSums row_sums_float(const float* raw, std::int64_t n, double inverse);                                       \
  HeadRowSums row_sums_double(const double* raw, std::int64_t n, double inverse);                                     \
  void row_gradient_float(float* raw, std::int64_t n, double inverse, const HeadRowSums& sums, double grad_logprob,   \
                          double grad_entropy);                                                                       \
  void row_gradient_double(double* raw, std::int64_t n, double inverse, const HeadRowSums& sums, double grad_logprob, \
                           double grad_entropy);                                                                      \
  }
ESPALIER_HEAD_KERNELS(baseline)
ESPALIER_HEAD_KERNELS(avx2)
ESPALIER_HEAD_KERNELS(avx512)
#undef ESPALIER_HEAD_KERNELS

HeadRowSums compute_row_sums(const float* raw, std::int64_t vocabulary, double inverse) {
  return function_for_set(baseline::row_sums_float, avx2::row_sums_float, avx512::row_sums_float)(raw, vocabulary,
                                                                                                  inverse);
}

HeadRowSums compute_row_sums(const double* raw, std::int64_t vocabulary, double inverse) {
  return function_for_set(baseline::row_sums_double, avx2::row_sums_double, avx512::row_sums_double)(raw, vocabulary,
                                                                                                     inverse);
}

void compute_row_gradient(float* raw, std::int64_t vocabulary, double inverse, const HeadRowSums& sums,
                          double grad_logprob, double grad_entropy) {
  function_for_set(baseline::row_gradient_float, avx2::row_gradient_float, avx512::row_gradient_float)(
      raw, vocabulary, inverse, sums, grad_logprob, grad_entropy);
}

void compute_row_gradient(double* raw, std::int64_t vocabulary, double inverse, const HeadRowSums& sums,
                          double grad_logprob, double grad_entropy) {
  function_for_set(baseline::row_gradient_double, avx2::row_gradient_double, avx512::row_gradient_double)(
      raw, vocabulary, inverse, sums, grad_logprob, grad_entropy);
}

}  // namespace espalier
