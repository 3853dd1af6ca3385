// Tokens drawn from rows of logits, with their log-probs.
//
// Shapes: B rows, V vocabulary, N tokens. The log-prob is over the whole vocabulary, at the
// rule's temperature (1 where that is 0).
#pragma once

#include <cstdint>

namespace at {
class Tensor;
}

namespace espalier {

// How a token is drawn from a row of logits.
//
//   p_v = exp(z_v - log sum_w exp z_w), z = logits / temperature, over the whole vocabulary V
//   kept: the first top_k tokens by (p descending, id ascending); of these the fewest first ones whose p reach
//         top_p times the p of all top_k
//   token: drawn from p renormalised over the kept ones, walking them by id until a uniform number is used up
// top-k before top-p, as vLLM and transformers order them; tokens of equal logits are kept apart by their id.
struct ChoiceRule {
  double temperature = 1;  // 0: the likeliest token, the lowest id of several
  std::int64_t top_k = 0;  // below 1: all
  double top_p = 1;        // 1: all
  double inverse_temperature() const { return temperature == 0 ? 1 : 1 / temperature; }  // of the log-prob
};

struct ChoiceOperations {
  // Token n of row b, begin_b <= n + begin_0 < begin_{b + 1} (int32), is drawn by uniform_n in [0, 1) (float64).
  // Overwrites token, as a number, and logprob (float64 both: one copy brings them to the host). Logits that are not
  // finite give a log-prob that is not finite.
  void (*choose_tokens)(const at::Tensor& logits_BV, const ChoiceRule& rule, const at::Tensor& begin_B1,
                        const at::Tensor& uniform_N, const at::Tensor& token_N, const at::Tensor& logprob_N);
};

}  // namespace espalier
