// Chooses one token from one row of logits (ops/choice.h): the likeliest, or one drawn from the tokens left by top-k
// and top-p.
//
// Arithmetic in double.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/ops/choice.h"
#include "espalier/ops/cpu/head_kernels.h"

namespace espalier {

struct TokenChoice {
  std::int32_t token = 0;
  double logprob = 0;  // over the whole vocabulary, at the rule's temperature (1 if that is 0)
};

// Scratch memory of one thread.
struct ChoiceScratch {
  std::vector<double> weight, run_sum, kept_weight;
  std::vector<std::int32_t> kept;
};

// Overwrites `kept` with the ids that may be drawn, ascending; empty: all. `weight_V` is p up to a factor; A is float
// or double.
template <class A>
void compute_kept(std::span<const A> logit_V, std::span<const double> weight_V, const ChoiceRule& rule,
                  std::vector<std::int32_t>& kept);

// `sums`: compute_row_sums of the row at rule.inverse_temperature(). `uniform` in [0, 1). Logits that are not finite
// give a log-prob that is not finite.
template <class A>
TokenChoice choose_token(std::span<const A> logit_V, const HeadRowSums& sums, const ChoiceRule& rule, double uniform,
                         ChoiceScratch& scratch);

}  // namespace espalier
