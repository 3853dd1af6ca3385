// Draws tokens on a device: contract and rule in ops/choice.h.
#pragma once

#include <cstdint>

#include "espalier/ops/choice.h"

namespace espalier::cuda {

// L is float or double. Weights are computed and added in double. kept_BW null: kept tokens are not asked for.
template <class L>
void choose_tokens(std::int64_t rows, std::int64_t vocabulary, const L* logits, const ChoiceRule& rule,
                   const std::int32_t* begin_B1, const double* uniform_N, double* token_N, double* logprob_N,
                   std::int32_t* kept_BW);

}  // namespace espalier::cuda
