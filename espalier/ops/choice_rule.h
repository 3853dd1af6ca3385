// How a token is drawn from a row of logits.
//
//   p_v = exp(z_v - log sum_w exp z_w), z = logits / temperature, over the whole vocabulary V
//   kept: the first top_k tokens by (p descending, id ascending); of these the fewest first ones whose p reach
//         top_p times the p of all top_k
//   token: drawn from p renormalised over the kept ones, walking them by id until a uniform number is used up
// top-k before top-p, as vLLM and transformers order them; tokens of equal logits are kept apart by their id.
#pragma once

#include <cstdint>

namespace espalier {

struct ChoiceRule {
  double temperature = 1;  // 0: the likeliest token, the lowest id of several
  std::int64_t top_k = 0;  // below 1: all
  double top_p = 1;        // 1: all
  double inverse_temperature() const { return temperature == 0 ? 1 : 1 / temperature; }  // of the log-prob
};

}  // namespace espalier
