// One token from one row of logits: the likeliest, or one drawn from those that top-k and top-p leave.
//
//   p_v = exp(z_v - log sum_w exp z_w), z = logits / temperature, over the whole vocabulary V
//   kept: the first top_k tokens by (p descending, id ascending); of these the fewest first ones whose p reach
//         top_p times the p of all top_k
//   token: drawn from p renormalised over the kept ones, walking them by id until a uniform number is used up
// Arithmetic in double. top-k before top-p, as vLLM and transformers order them; tokens of equal logits are kept apart
// by their id.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/ops/cpu/head_kernels.h"

namespace espalier {

struct ChoiceRule {
  double temperature = 1;  // 0: the likeliest token, the lowest id of several
  std::int64_t top_k = 0;  // below 1: all
  double top_p = 1;        // 1: all
  double inverse_temperature() const { return temperature == 0 ? 1 : 1 / temperature; }  // of the log-prob
};

struct TokenChoice {
  std::int32_t token = 0;
  double logprob = 0;  // over the whole vocabulary, at the rule's temperature (1 where that is 0)
};

// What one thread needs beside its row.
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
