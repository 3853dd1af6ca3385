// Draws tokens from rows of logits, with their log-probs.
//
// Shapes: B rows, V vocabulary, N tokens. The log-prob is over the whole vocabulary, at the rule's temperature (at 1 if
// that is 0).
#pragma once

#include <cstdint>

namespace at {
class Tensor;
}

namespace espalier {

// How a token is drawn from a row of logits.
//
//   p_v = exp(z_v - log sum_w exp z_w), z = logits / temperature, over the whole vocabulary V
//   kept: the first top_k tokens by (p descending, id ascending); of these the shortest beginning whose sum of p is at
//         least top_p times the sum over all top_k
//   token: drawn from p renormalised over the kept ones: the first by id whose cumulated p exceeds a uniform number
// top-k comes before top-p, as in vLLM and transformers; the id decides between tokens of equal logits.
struct ChoiceRule {
  double temperature = 1;  // 0: the most likely token, the lowest id among equals
  std::int64_t top_k = 0;  // below 1: all
  double top_p = 1;        // 1: all
  double inverse_temperature() const { return temperature == 0 ? 1 : 1 / temperature; }  // of the log-prob
  bool keeps_all(std::int64_t vocabulary) const { return (top_k < 1 || top_k >= vocabulary) && !(top_p < 1); }
};

struct ChoiceOperations {
  // Token n of row b, begin_b <= n + begin_0 < begin_{b + 1} (int32), is drawn with uniform_n in [0, 1) (float64).
  // Overwrites token (the id) and logprob; both are float64, so that one copy brings them to the host. Logits that are
  // not finite give a log-prob that is not finite. If `kept` is defined and the temperature is not 0, also writes the
  // kept tokens of each row with tokens to draw: bit v % 32 of word v / 32 is 1 if token v is kept (int32, W words).
  void (*choose_tokens)(const at::Tensor& logits_BV, const ChoiceRule& rule, const at::Tensor& begin_B1,
                        const at::Tensor& uniform_N, const at::Tensor& token_N, const at::Tensor& logprob_N,
                        const at::Tensor& kept_BW);
};

}  // namespace espalier
