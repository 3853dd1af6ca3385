// The fused head on one row of logits, without torch.
//
// z_v = raw_v / temperature, y_v = z_v - max z, s = sum_v exp y_v; log p_v = y_v - log s; entropy = log s -
// sum_v y_v exp(y_v) / s. Logits of any size do not overflow: the maximum is subtracted before any
// rounding.
#pragma once

#include <cstdint>

namespace espalier {

inline constexpr std::int64_t kParallelLogits = 1 << 15;  // fewer logits are finished before other threads wake

// Sums over a part of a row's logits. Parts with the same maximum can be added.
struct HeadRowParts {
  double max_raw = 0;       // max_v raw_v
  double sum_exp = 0;       // s
  double sum_weighted = 0;  // sum_v y_v exp y_v
};

struct HeadRowSums {
  double max_raw = 0;  // max_v raw_v
  double log_sum = 0;  // log s
  double entropy = 0;
};

// log p of the token whose logit is raw.
inline double token_logprob(double raw, double inverse_temperature, const HeadRowSums& sums) {
  return (raw - sums.max_raw) * inverse_temperature - sums.log_sum;
}

// Sums over a run of 1024 values are in the type of the logits, sums over runs in double. One pass over memory.
HeadRowParts compute_row_parts(const float* raw, std::int64_t columns, double inverse_temperature);
HeadRowParts compute_row_parts(const double* raw, std::int64_t columns, double inverse_temperature);
// The same sums for a larger maximum; for an equal maximum bitwise identical.
HeadRowParts with_maximum(const HeadRowParts& parts, double max_raw, double inverse_temperature);
// The sums of a row from parts that hold all its logits.
HeadRowSums row_sums_of(const HeadRowParts& whole);
HeadRowSums compute_row_sums(const float* raw, std::int64_t vocabulary, double inverse_temperature);
HeadRowSums compute_row_sums(const double* raw, std::int64_t vocabulary, double inverse_temperature);

// Overwrites raw_v with -inverse_temperature * p_v * (grad_logprob + grad_entropy * (log p_v + entropy)): the gradient
// of raw_v without what the row's targets add. grad_logprob is the sum over the row's edges.
void compute_row_gradient(float* raw, std::int64_t vocabulary, double inverse_temperature, const HeadRowSums& sums,
                          double grad_logprob, double grad_entropy);
void compute_row_gradient(double* raw, std::int64_t vocabulary, double inverse_temperature, const HeadRowSums& sums,
                          double grad_logprob, double grad_entropy);

}  // namespace espalier
