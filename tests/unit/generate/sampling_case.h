// Tiny models, prompts of several lengths, and the plain way to continue them: the whole sequence through the decoder
// for every token, nothing cached, nothing shared.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/generate/sampler.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {

// Prompts of these lengths with random ids; the last one equals the first.
std::vector<Prompt> make_prompts(const std::vector<std::int64_t>& lengths, std::int64_t vocabulary, std::uint64_t seed);

Generated sample(ModelState& model, const std::vector<Prompt>& prompts, const SamplingSettings& settings);

// Logits of every position of one sequence, [T, V], in the model's dtype.
at::Tensor dense_logits_TV(ModelState& model, const std::vector<std::int32_t>& ids);

// Log-probs of a rollout's response at its temperature, from dense logits and ATen's log_softmax in float64.
std::vector<double> dense_logprobs(ModelState& model, const Rollout& rollout);

// A float64 model with the very weights of another.
std::unique_ptr<ModelState> in_float64(const ModelState& model);

}  // namespace espalier::testing
