// Picks the instruction set of the head's row kernels at run time.
#include "espalier/ops/cpu/head_kernels.h"

#include <cmath>

#include "espalier/base/instruction_set.h"

namespace espalier {

#define ESPALIER_HEAD_KERNELS(set)                                                                                    \
  namespace set {                                                                                                     \
  HeadRowParts row_parts_float(const float* raw, std::int64_t n, double inverse);                                     \
  HeadRowParts row_parts_double(const double* raw, std::int64_t n, double inverse);                                   \
  void row_gradient_float(float* raw, std::int64_t n, double inverse, const HeadRowSums& sums, double grad_logprob,   \
                          double grad_entropy);                                                                       \
  void row_gradient_double(double* raw, std::int64_t n, double inverse, const HeadRowSums& sums, double grad_logprob, \
                           double grad_entropy);                                                                      \
  }
ESPALIER_EACH_SET(ESPALIER_HEAD_KERNELS)
#undef ESPALIER_HEAD_KERNELS

HeadRowParts compute_row_parts(const float* raw, std::int64_t columns, double inverse) {
  return ESPALIER_FOR_SET(row_parts_float)(raw, columns, inverse);
}

HeadRowParts compute_row_parts(const double* raw, std::int64_t columns, double inverse) {
  return ESPALIER_FOR_SET(row_parts_double)(raw, columns, inverse);
}

HeadRowParts with_maximum(const HeadRowParts& parts, double max_raw, double inverse) {
  const double shift = (max_raw - parts.max_raw) * inverse, scale = std::exp(-shift);
  return {max_raw, scale * parts.sum_exp, scale == 0 ? 0 : scale * (parts.sum_weighted - shift * parts.sum_exp)};
}

HeadRowSums row_sums_of(const HeadRowParts& whole) {
  const double log_sum = std::log(whole.sum_exp);
  return {whole.max_raw, log_sum, log_sum - whole.sum_weighted / whole.sum_exp};
}

HeadRowSums compute_row_sums(const float* raw, std::int64_t vocabulary, double inverse) {
  return row_sums_of(compute_row_parts(raw, vocabulary, inverse));
}

HeadRowSums compute_row_sums(const double* raw, std::int64_t vocabulary, double inverse) {
  return row_sums_of(compute_row_parts(raw, vocabulary, inverse));
}

void compute_row_gradient(float* raw, std::int64_t vocabulary, double inverse, const HeadRowSums& sums,
                          double grad_logprob, double grad_entropy) {
  ESPALIER_FOR_SET(row_gradient_float)(raw, vocabulary, inverse, sums, grad_logprob, grad_entropy);
}

void compute_row_gradient(double* raw, std::int64_t vocabulary, double inverse, const HeadRowSums& sums,
                          double grad_logprob, double grad_entropy) {
  ESPALIER_FOR_SET(row_gradient_double)(raw, vocabulary, inverse, sums, grad_logprob, grad_entropy);
}

}  // namespace espalier
