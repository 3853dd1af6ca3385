// The part of a call of generate() that shares its prompts over ranks of dp and brings their results together.
#include "espalier/generate/generation.h"
#include "espalier/generate/kept_draws.h"

namespace espalier::generation {

// The longest first, each to the rank that has least.
void Generation::keep_own_prompts() {
  own_.assign(results_.size(), 1);
  Group& dp = decoder_.mesh().dp;
  if (dp.size() == 1) return;
  std::vector<double> tokens;
  for (const auto& state : prompts_)
    tokens.push_back(static_cast<double>(state->prompt_rows() +
                                         state->longest * static_cast<std::int64_t>(state->responses.size())));
  const std::vector<std::int64_t> rank_of = deal_by_weight(tokens, dp.size());
  std::vector<std::unique_ptr<PromptState>> own;
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    if ((prompts_[i]->dp_rank < 0 ? rank_of[i] : prompts_[i]->dp_rank) == dp.rank()) {
      own.push_back(std::move(prompts_[i]));
      continue;
    }
    for (const std::int64_t response : prompts_[i]->responses) own_[static_cast<std::size_t>(response)] = 0;
  }
  prompts_ = std::move(own);
}

// Adds the results of the other ranks of dp, to which this one contributes zeros.
void Generation::gather_results() {
  Group& dp = decoder_.mesh().dp;
  if (dp.size() == 1) return;
  if (settings_.renders) return gather_ends(), gather_report();  // all_records gathers
  std::vector<std::int64_t> lengths, tokens;
  for (const Rollout& rollout : results_) lengths.push_back(rollout.response_length());
  add_over_ranks(dp, lengths);
  std::vector<double> logprobs;
  for (std::size_t i = 0; i < results_.size(); ++i) {
    Rollout& rollout = results_[i];
    const auto length = static_cast<std::size_t>(lengths[i]);
    rollout.response_ids.resize(length), rollout.rollout_logprobs.resize(length), rollout.loss_mask.resize(length);
    // A token and its mask in one number.
    for (std::size_t t = 0; t < length; ++t) tokens.push_back(2 * rollout.response_ids[t] + rollout.loss_mask[t]);
    logprobs.insert(logprobs.end(), rollout.rollout_logprobs.begin(), rollout.rollout_logprobs.end());
  }
  add_over_ranks(dp, tokens);
  logprobs = sums_over_ranks(dp, std::move(logprobs));
  std::size_t next = 0;
  for (Rollout& rollout : results_)
    for (std::size_t t = 0; t < rollout.response_ids.size(); ++t, ++next) {
      rollout.response_ids[t] = static_cast<std::int32_t>(tokens[next] / 2);
      rollout.loss_mask[t] = static_cast<std::uint8_t>(tokens[next] % 2);
      rollout.rollout_logprobs[t] = logprobs[next];
    }
  if (keeps_sets_) gather_kept_sets(dp, results_);
  gather_ends();
  gather_report();
}

// The reasons why responses ended, and the first rank's failure.
void Generation::gather_ends() {
  Group& dp = decoder_.mesh().dp;
  std::vector<std::int64_t> reasons;
  for (const Response& one : responses_) reasons.push_back(static_cast<std::int64_t>(one.finish));
  add_over_ranks(dp, reasons);
  for (std::size_t i = 0; i < results_.size(); ++i)
    if (!own_[i]) add_carried(results_[i].carried, "finish_reason", kFinishTexts[static_cast<std::size_t>(reasons[i])]);
  const std::vector<std::uint64_t> failed = numbers_of_ranks(dp, failure_ ? 1 : 0);
  const auto first = std::ranges::find(failed, 1u);
  if (first == failed.end()) return;
  if (!failure_) failure_.emplace();
  for (std::string ErrorText::*part : {&ErrorText::where, &ErrorText::expected, &ErrorText::got, &ErrorText::remedy})
    *failure_.*part = text_of_rank(dp, *failure_.*part, static_cast<int>(first - failed.begin()));
}

void Generation::gather_report() {
  Group& dp = decoder_.mesh().dp;
  std::vector<std::int64_t> counts{report_.prompt_rows_physical, report_.response_tokens, report_.turns,
                                   report_.observation_tokens, report_.kept_ids};
  add_over_ranks(dp, counts);
  report_.prompt_rows_physical = counts[0], report_.response_tokens = counts[1];
  report_.turns = counts[2], report_.observation_tokens = counts[3], report_.kept_ids = counts[4];
  const std::vector<double> most = maxima_over_ranks(
      dp, {static_cast<double>(report_.decode_steps), report_.seconds_prompt, report_.seconds_decode});
  report_.decode_steps = std::llround(most[0]), report_.seconds_prompt = most[1], report_.seconds_decode = most[2];
}

// Ranks of ep with other prompts than each other run their forwards together; who has ended joins the others'.
bool Generation::somebody_runs(bool own) {
  const Mesh& mesh = decoder_.mesh();
  if (mesh.degrees.ep <= mesh.degrees.tp) return own;
  return sums_over_ranks(mesh.ep, {own ? 1.0 : 0.0}).front() > 0;
}

}  // namespace espalier::generation
