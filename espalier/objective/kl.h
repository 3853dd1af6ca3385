// Estimators of the KL divergence to the reference policy at one token, with their derivatives.
// x = logprob - ref. Equations: docs/objectives.md (25) to (29). Meaning of the names: verl 0.9, kl_penalty.
#pragma once

#include "espalier/options/choices.h"

namespace espalier {

enum class KlEstimator { k1, absolute, k2, k3, k3_unbounded, k3_unbiased };

struct KlType {
  KlEstimator estimator = KlEstimator::k3;
  bool straight_through = false;  // "+": this estimator's value with the gradient of k2
};

KlType kl_type_of(KlLossType type);  // by kl_types.def

struct KlTerm {
  double value = 0;
  double gradient = 0;  // d value / d logprob, as torch.autograd gives it (clamps pass the gradient at their bounds)
};

// For k3_unbiased (DeepSeek-V3.2; TRL's use_bias_correction_kl): k3_unbounded; the caller multiplies it by the ratio.
KlTerm kl_term(KlType type, double logprob, double ref_logprob);

}  // namespace espalier
