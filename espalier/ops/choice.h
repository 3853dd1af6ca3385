// Tokens drawn from rows of logits, with their log-probs.
//
// Shapes: B rows, V vocabulary, N tokens. The log-prob is over the whole vocabulary, at the
// rule's temperature (1 where that is 0).
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/choice_rule.h"

namespace espalier {

struct ChoiceOperations {
  // Token n of row b, begin_b <= n + begin_0 < begin_{b + 1} (int32), is drawn by uniform_n in [0, 1) (float64).
  // Overwrites token, as a number, and logprob (float64 both: one copy brings them to the host). Logits that are not
  // finite give a log-prob that is not finite.
  void (*choose_tokens)(const at::Tensor& logits_BV, const ChoiceRule& rule, const at::Tensor& begin_B1,
                        const at::Tensor& uniform_N, const at::Tensor& token_N, const at::Tensor& logprob_N);
};

}  // namespace espalier
