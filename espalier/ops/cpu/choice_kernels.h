// Weights of a row of logits for drawing from it, without torch.
#pragma once

#include <cstdint>

namespace espalier {

inline constexpr std::int64_t kWeightRun = 512;  // tokens whose weights are also given as one sum

// Overwrites weight_v = exp((logit_v - max_logit) inverse_temperature) [V] and run_sum [V / kWeightRun, rounded up].
// Computes in double for any type of logits. No logit of the row exceeds max_logit.
void compute_weights(const float* logit_V, std::int64_t vocabulary, double max_logit, double inverse_temperature,
                     double* weight_V, double* run_sum);
void compute_weights(const double* logit_V, std::int64_t vocabulary, double max_logit, double inverse_temperature,
                     double* weight_V, double* run_sum);

}  // namespace espalier
