// One sampled response and the trainer's data about it. Immutable once read; the reader checks every value.
//
// A rollout's tokens are prompt_ids followed by response_ids; `depth` counts along that sequence from 0.
// Series hold one value for each response token, or are empty where the record has none. Log-probs are natural
// logarithms; entry t belongs to response_ids[t], which the row at depth prompt_length() + t - 1 predicts. A rollout
// with given targets has series over these instead.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/options/choices.h"

namespace espalier {

// Experts chosen by the inference engine, to be used again in training. A token without a record uses its router's
// choice: the last token, which engines do not run, and layers of a token whose ids are kFree.
struct RecordedExperts {
  static constexpr std::uint16_t kFree = 0xffff;

  std::int32_t tokens = 0;              // depths [0, tokens) are recorded; 0: nothing is
  std::int32_t layers = 0, chosen = 0;  // expert layers in order; experts of each: as they came, ascending once sorted
  std::vector<std::uint16_t> ids;       // [tokens, layers, chosen]
};

// The tokens that the sampler could draw, after top-k and top-p, for each response token. Log-prob, entropy and
// gradient of a token with such a set are over the set; without one, over the whole vocabulary.
struct KeptSets {
  std::vector<std::int64_t> begin;  // [response tokens + 1]; empty: no token has a set
  std::vector<std::int32_t> ids;    // the set of token t: [begin_t, begin_{t + 1}), ascending, the token among them

  bool empty() const { return begin.empty(); }
  // The set of response token `position`; empty: the whole vocabulary.
  std::span<const std::int32_t> at(std::size_t position) const {
    if (begin.empty()) return {};
    return std::span(ids).subspan(static_cast<std::size_t>(begin[position]),
                                  static_cast<std::size_t>(begin[position + 1] - begin[position]));
  }
};

// The rollout's pair of answers (--objective dpo, reward), or its list of scored answers (reward).
struct PairPlace {
  std::int64_t pair = -1;             // of the pair or list, counted over all files, from 0; -1: of none
  bool chosen = false;                // of a pair: else rejected
  std::optional<double> ref_logprob;  // of the answer under the reference, summed over its tokens with loss
  std::optional<double> score;        // of a list: larger is better
  double margin = 0;                  // of a pair: by which the chosen answer's score should be larger
};

// Targets that differ from the tokens: the row at depth d predicts ids[d * columns, (d + 1) * columns). Every row of
// the rollout predicts, the last one too.
struct GivenTargets {
  std::vector<std::int32_t> ids;  // [length, columns]
  std::int32_t columns = 0;       // of a row; 0: none are given, and rows predict the response's tokens
};

// Why a token has no loss although its record gives it one.
enum class Silenced : std::uint8_t {
  no,
  shared,    // another branch of its trajectory trains it (--shared-tokens)
  rejected,  // --rollout-rs
};

struct Rollout {
  std::vector<std::int32_t> prompt_ids;    // at least one
  std::vector<std::int32_t> response_ids;  // may be empty
  std::vector<std::uint8_t> loss_mask;     // one 0/1 per response token, always filled
  std::vector<double> advantages;          // as given, one per response token; empty: from the reward
  std::optional<double> reward;
  std::vector<double> token_rewards;  // one per response token, with the sum `reward`; empty: at the last loss token
// Data of losses: series and single values, a member for each row.
#define ESPALIER_RECORD_TEXT(field, use) std::string field;
#define ESPALIER_RECORD_INTEGER(field, use) std::optional<std::int64_t> field;
#define ESPALIER_RECORD_WORD(field, Choice, use) std::optional<Choice> field;
#define ESPALIER_RECORD_AMOUNT(field, use) std::optional<double> field;
#define ESPALIER_RECORD_SERIES(field, kind, use) std::vector<double> field;
#include "espalier/rollout/record_data.def"
  RecordedExperts recorded_experts;
  KeptSets kept_sets;
  GivenTargets given_targets;  // then series have one value for each target, and the response is empty
  double temperature = 1.0;
  std::vector<double> loss_shares;  // its part of each token's loss (shared_tokens.h); empty: 1
  std::vector<Silenced> silenced;   // why a response token of loss_mask 0 lost its loss; empty: none did
  PairPlace pair;
  std::string carried;     // JSON object text of id, meta and unknown fields; empty: none
  std::int64_t index = 0;  // place in the input, over all files, from 0
  std::string where;       // "rollouts.jsonl:17"

  std::int32_t prompt_length() const { return static_cast<std::int32_t>(prompt_ids.size()); }
  std::int32_t response_length() const { return static_cast<std::int32_t>(response_ids.size()); }
  std::int32_t length() const { return prompt_length() + response_length(); }
  // Rows at depths [first_predicting, first_predicting + predicting) predict `columns` targets each. Position p of a
  // series belongs to target p.
  std::int32_t columns() const { return given_targets.columns > 0 ? given_targets.columns : 1; }
  std::int32_t first_predicting() const { return given_targets.columns > 0 ? 0 : prompt_length() - 1; }
  std::int32_t predicting() const { return given_targets.columns > 0 ? length() : response_length(); }
  std::int32_t targets() const { return predicting() * columns(); }
  std::int32_t target(std::int32_t position) const {
    return (given_targets.columns > 0 ? given_targets.ids : response_ids)[static_cast<std::size_t>(position)];
  }
  std::int32_t token_at(std::int32_t depth) const {
    return depth < prompt_length() ? prompt_ids[depth] : response_ids[depth - prompt_length()];
  }
  // Its part of a response token's loss, 0 for a masked token.
  double loss_share(std::size_t position) const {
    return loss_mask[position] == 0 ? 0 : loss_shares.empty() ? 1 : loss_shares[position];
  }
  // Its loss tokens, each counted by its share.
  double loss_tokens() const {
    double sum = 0;
    for (std::size_t t = 0; t < loss_mask.size(); ++t) sum += loss_share(t);
    return sum;
  }
  Silenced silence_of(std::size_t position) const { return silenced.empty() ? Silenced::no : silenced[position]; }
  void silence(std::size_t position, Silenced reason) {
    silenced.resize(loss_mask.size());
    silenced[position] = reason, loss_mask[position] = 0;
  }
  // The sampler's log-prob of a response token; `old`, the old policy's, where it is not recorded.
  double sampled_logprob(std::size_t position, double old) const {
    const double sampled = rollout_logprobs.empty() ? old : rollout_logprobs[position];
    return std::isnan(sampled) ? old : sampled;
  }
  // The recorded experts of a token, [layers, chosen], kFree in layers where it chooses freely; empty: in all of them.
  std::span<const std::uint16_t> experts_at(std::int32_t depth) const {
    if (depth >= recorded_experts.tokens) return {};
    const auto width =
        static_cast<std::size_t>(recorded_experts.layers) * static_cast<std::size_t>(recorded_experts.chosen);
    const auto experts = std::span(recorded_experts.ids).subspan(static_cast<std::size_t>(depth) * width, width);
    const auto free = [](std::uint16_t id) { return id == RecordedExperts::kFree; };
    return free(experts.front()) && std::ranges::all_of(experts, free) ? std::span<const std::uint16_t>{} : experts;
  }
};

}  // namespace espalier
