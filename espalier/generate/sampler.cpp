#include "espalier/generate/sampler.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <limits>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/generate/generation.h"
#include "espalier/model/joined_experts.h"

namespace espalier {
namespace generation {
namespace {

// The least number of any rank, so that all admit as many responses.
std::int64_t least_of_all(const Mesh& mesh, std::int64_t bytes) {
  return static_cast<std::int64_t>(-maxima_over_ranks(mesh.world, {-static_cast<double>(bytes)}).front());
}

// Tokens that a response to this prompt may have. It ends at the model's positions, unless the prompt fills them.
std::int64_t longest_response(const ModelShape& shape, const Prompt& prompt, const SamplingSettings& settings) {
  const std::int64_t most = settings.max_response_length - prompt.observed;
  const std::int64_t left = shape.max_positions - static_cast<std::int64_t>(prompt.ids.size());
  return left > 0 ? std::min(most, left) : most;
}

void check_settings(const SamplingSettings& s) {
  const auto require = [](bool fine, const char* option, const char* expected, double got) {
    if (!fine) throw OptionError({option, expected, text_of(got), ""});
  };
  require(s.n >= 1, "--n", "at least 1", static_cast<double>(s.n));
  require(s.temperature >= 0 && std::isfinite(s.temperature), "--temperature", "a number, at least 0", s.temperature);
  require(s.top_p > 0 && s.top_p <= 1, "--top-p", "a number in (0, 1]", s.top_p);
  require(s.max_response_length >= 1, "--max-response-length", "at least 1",
          static_cast<double>(s.max_response_length));
}

void check_prompt(const ModelShape& shape, const Prompt& prompt, const SamplingSettings& settings) {
  if (prompt.ids.empty()) throw InputError({prompt.where + ": prompt_ids", "at least one token", "an empty list", ""});
  if (prompt.observed >= settings.max_response_length)
    throw InputError({prompt.where,
                      text_of("a first observation of fewer than ", settings.max_response_length, " tokens"),
                      text_of(prompt.observed), "raise --max-response-length, or let reset return less"});
  for (const std::int32_t id : prompt.ids)
    if (id < 0 || id >= shape.vocabulary)
      throw InputError({prompt.where + ": prompt_ids", text_of("token ids in [0, ", shape.vocabulary, ")"), text_of(id),
                        "Was this prompt made with another tokenizer or model?"});
}

DecodingLimits limits_of(const Decoder& decoder, const SamplingSettings& settings) {
  DecodingLimits limits;
  if (settings.max_num_seqs > 0) limits.most_at_once = settings.max_num_seqs;
  if (settings.token_budget > 0) limits.token_budget = settings.token_budget;
  limits.kv_bytes = least_of_all(
      decoder.mesh(), settings.kv_limit_bytes > 0 ? settings.kv_limit_bytes : decoder.device().free_bytes() / 2);
  limits.share_prompts = settings.share_prompts;
  return limits;
}

}  // namespace

Generation::Generation(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings,
                       Arena& arena, Progress& progress)
    : decoder_(decoder),
      settings_(settings),
      rule_{settings.temperature, settings.top_k, settings.top_p},
      keeps_sets_(settings.kept_sets && settings.temperature > 0 &&
                  !rule_.keeps_all(decoder.local().whole().vocabulary)),
      arena_(arena),
      progress_(progress),
      decoding_(decoder, limits_of(decoder, settings), arena) {
  check_settings(settings);
  for (const Prompt& prompt : prompts) check_prompt(decoder.local().whole(), prompt, settings);
  ESPALIER_INTERNAL(positions_needed(decoder.shape(), prompts, settings) <= decoder.positions(), "rotary tables of ",
                    decoder.positions(), " positions");
  make_results(prompts);
  make_prompts(prompts);
  keep_own_prompts();
}

void Generation::make_results(std::span<const Prompt> prompts) {
  results_.reserve(prompts.size() * static_cast<std::size_t>(settings_.n));
  for (std::size_t p = 0; p < prompts.size(); ++p)
    for (std::int64_t r = 0; r < settings_.n; ++r) {
      report_.prompt_rows_logical += static_cast<std::int64_t>(prompts[p].ids.size());
      Rollout rollout;
      rollout.prompt_ids = prompts[p].ids;
      rollout.group = prompts[p].group.empty() ? std::to_string(p) : prompts[p].group;
      rollout.carried = prompts[p].carried;
      rollout.temperature = settings_.temperature > 0 ? settings_.temperature : 1;
      rollout.index = static_cast<std::int64_t>(results_.size());
      rollout.where = prompts[p].where;
      results_.push_back(std::move(rollout));
    }
}

void Generation::make_prompts(std::span<const Prompt> prompts) {
  std::map<std::pair<std::int64_t, std::vector<std::int32_t>>, PromptState*> known;
  const auto add = [&](const Prompt& prompt) {
    prompts_.push_back(std::make_unique<PromptState>());
    PromptState& state = *prompts_.back();
    state.ids = prompt.ids;
    state.where = prompt.where, state.dp_rank = prompt.dp_rank;
    state.longest = longest_response(decoder_.shape(), prompt, settings_);
    return &state;
  };
  const Random random(settings_.seed);
  responses_.reserve(results_.size());
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    for (std::int64_t r = 0; r < settings_.n; ++r) {
      PromptState*& state = known[{prompts[p].dp_rank, prompts[p].ids}];
      if (!state || !settings_.share_prompts) state = add(prompts[p]);
      state->responses.push_back(static_cast<std::int64_t>(responses_.size()));
      const std::int64_t limit = state->prompt_rows() + longest_response(decoder_.shape(), prompts[p], settings_);
      responses_.push_back(
          {.random = random.fork(p).fork(static_cast<std::uint64_t>(r)), .limit = limit, .where = prompts[p].where});
    }
  }
}

DecodingRules Generation::rules_of(const Response& response, const PromptState& state) const {
  DecodingRules rules;
  rules.choice = rule_;
  rules.longest = response.limit - state.prompt_rows();
  rules.stop_ids = settings_.stop_ids;
  rules.stops = settings_.stops;
  rules.random = response.random;
  rules.kept_sets = keeps_sets_;
  return rules;
}

void Generation::add_to_machine() {
  for (const auto& state : prompts_) {
    std::vector<DecodingRules> rules;
    for (const std::int64_t index : state->responses) rules.push_back(rules_of(response(index), *state));
    std::int64_t number = decoding_.add({state->ids.begin(), state->ids.end()}, std::move(rules), state->where);
    for (const std::int64_t index : state->responses) {
      of_machine_[number] = index;
      response(index).number = number++;
    }
  }
}

void Generation::show_progress() {
  decoding_.set_on_rows([this](std::int64_t rows) {
    progress_.part(text_of("prompts: ", format_count(decoding_.counts().prompt_rows), " of ",
                           format_count(prompt_rows_), " tokens computed"));
    progress_.advance_to(done_ += rows);
  });
  decoding_.set_on_tokens([this](std::int64_t tokens) { progress_.advance_to(done_ += tokens); });
}

Generated Generation::run() {
  const at::AutoDispatchBelowADInplaceOrView unrecorded;  // as the passes of a step
  const std::shared_ptr<void> held = hold_weights(decoder_);
  std::int64_t responses = 0;
  for (const auto& state : prompts_) {
    prompt_rows_ += state->prompt_rows();
    responses += state->longest * static_cast<std::int64_t>(state->responses.size());
  }
  progress_.begin("generating", prompt_rows_ + responses, "tokens");
  const Timer timer;
  decoding_.set_before_forward([this] { somebody_runs(true); });
  show_progress();
  add_to_machine();
  while (!failure_ && decoding_.waiting() + decoding_.held() > 0) {
    for (const std::int64_t number : decoding_.step()) settle(of_machine_.at(number));
    if (settings_.turns) exchange_turns();
  }
  if (failure_) cut_unfinished();
  while (somebody_runs(false)) join_decoder_forward(decoder_, arena_);
  progress_.end();
  const DecodingCounts& counts = decoding_.counts();
  report_.prompt_rows_physical = counts.prompt_rows, report_.decode_steps = counts.decode_steps;
  report_.response_tokens = counts.sampled_tokens, report_.kept_ids = counts.kept_ids;
  report_.kv_bytes = counts.kv_bytes, report_.kv_bytes_unshared = counts.kv_bytes_unshared;
  report_.seconds_prompt = counts.seconds_prompt;
  report_.seconds_decode = timer.total() - report_.seconds_prompt;
  gather_results();
  report_.kept_sets = keeps_sets_;
  report_.responses = static_cast<std::int64_t>(results_.size());
  report_.prompts = report_.responses / settings_.n;
  Generated out{{}, {}, report_, std::move(failure_)};
  std::vector<std::vector<Rollout>> records = all_records();
  for (std::size_t i = 0; i < records.size(); ++i)
    for (Rollout& record : records[i]) {
      if (record.kept_sets.ids.empty()) record.kept_sets = {}, record.full_logprobs.clear();
      record.index = static_cast<std::int64_t>(out.rollouts.size());
      out.rollouts.push_back(std::move(record));
      out.trajectory.push_back(static_cast<std::int64_t>(i));
    }
  return out;
}

// Copies what the machine has of the response.
void Generation::take_series(std::int64_t index) {
  const DecodedResponse& from = decoding_.response(response(index).number);
  Rollout& to = result(index);
  to.response_ids = from.tokens;
  to.rollout_logprobs = from.logprobs;
  to.loss_mask = from.sampled;
  to.full_logprobs = from.full_logprobs;
  to.kept_sets = from.kept_sets;
}

void Generation::settle(std::int64_t index) {
  take_series(index);
  if (settings_.turns) return end_turn(index);
  finish(index, decoding_.response(response(index).number).end == ResponseEnd::stop ? Finish::stop : Finish::length);
}

void Generation::end_turn(std::int64_t index) {
  Response& one = response(index);
  const std::vector<std::int32_t>& ids = result(index).response_ids;
  ++one.turns, ++report_.turns;
  const bool last =
      one.turns == settings_.most_turns || result(index).response_length() == decoding_.rules(one.number).longest;
  ended_.push_back({index, {ids.begin() + one.turn_begin, ids.end()}, last});
}

void Generation::finish(std::int64_t index, Finish reason) {
  Response& one = response(index);
  add_carried(result(index).carried, "finish_reason", kFinishTexts[static_cast<std::size_t>(reason)]);
  done_ += decoding_.rules(one.number).longest - result(index).response_length();
  of_machine_.erase(one.number);
  decoding_.remove(std::exchange(one.number, -1));
  one.finish = reason;
}

void Generation::cut_unfinished() {
  for (std::size_t i = 0; i < results_.size(); ++i) {
    if (!own_[i] || responses_[i].finish != Finish::none) continue;
    take_series(static_cast<std::int64_t>(i));
    responses_[i].finish = Finish::abort;
    add_carried(results_[i].carried, "finish_reason", kFinishTexts[static_cast<std::size_t>(Finish::abort)]);
  }
}

}  // namespace generation

std::int64_t positions_needed(const ModelShape& shape, std::span<const Prompt> prompts,
                              const SamplingSettings& settings) {
  std::int64_t longest = 0;
  for (const Prompt& prompt : prompts)
    longest = std::max(
        longest, static_cast<std::int64_t>(prompt.ids.size()) + generation::longest_response(shape, prompt, settings));
  return longest;
}

Generated generate(const Decoder& decoder, std::span<const Prompt> prompts, const SamplingSettings& settings,
                   Arena& arena, Progress& progress) {
  const ArenaScope scope(arena);
  return generation::Generation(decoder, prompts, settings, arena, progress).run();
}

}  // namespace espalier
