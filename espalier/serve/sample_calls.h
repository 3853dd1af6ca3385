// Requests to a sampler, and the answers.
//
// P tokens of a prompt, K numbers of a position.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace espalier::serve {

// Positions of a prompt whose log-probs of other tokens are asked for: row i is the distribution after i + 1 tokens.
struct TargetTokens {
  std::vector<std::int64_t> shape;                // [P - 1, K]
  std::vector<std::int32_t> ids;                  // -1: none; in the order of the layout
  std::vector<std::int64_t> row_begins, columns;  // of a sparse layout; empty: dense
};

struct SampleCall {
  std::vector<std::int32_t> prompt;
  std::int64_t samples = 1, most_tokens = 0;
  double temperature = 1, top_p = 1;
  std::int64_t top_k = 0;  // below 1: all
  std::optional<std::uint64_t> seed;
  bool stops_at_end = true;  // at the model's own end tokens
  std::vector<std::int32_t> stop_ids;
  std::vector<std::string> stop_texts;
  bool prompt_logprobs = false;
  std::int64_t first_prompt_logprob = 1;  // positions before have none
  std::int64_t top_prompt = 0;            // the likeliest tokens of each position of the prompt
  std::int64_t top_sampled = 0;           // the same of each sampled token
  std::optional<TargetTokens> targets;
  std::int64_t drawn_prompt = 0;  // tokens drawn for each position of the prompt

  bool reads_prompt() const { return prompt_logprobs || top_prompt > 0 || targets || drawn_prompt > 0; }
};

using LikelyTokens = std::vector<std::pair<std::int32_t, float>>;  // the likeliest first

struct SampledSequence {
  std::vector<std::int32_t> tokens;  // the stop token included
  std::vector<float> logprobs;
  bool stopped = false;           // else the length ended it
  std::vector<LikelyTokens> top;  // one for each token, if asked for
};

struct SampleAnswer {
  std::vector<SampledSequence> sequences;
  std::vector<float> prompt_logprobs;                   // [P], NaN where there is none
  std::vector<LikelyTokens> top_prompt;                 // [P], empty where there is none
  std::vector<float> targets;                           // in the order of TargetTokens::ids
  std::vector<std::vector<std::int32_t>> drawn_tokens;  // [P - 1][K]
  std::vector<std::vector<float>> drawn_logprobs;
  std::int64_t cached_tokens = 0;  // of the prompt, whose rows were there already
};

}  // namespace espalier::serve
