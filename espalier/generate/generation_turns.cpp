// The part of a call of generate() that takes answers of environments and begins further turns.
#include "espalier/generate/generation.h"

namespace espalier::generation {

// Asks about ended turns, and takes up what was asked about kStepsAhead steps ago, or now where nothing else can run.
void Generation::exchange_turns() {
  if (!asked_.empty() && (report_.decode_steps - asked_at_ >= kStepsAhead || !anything_runs())) {
    std::vector<NextTurn> answers;
    try {
      answers = settings_.turns->answers();
    } catch (const InputError& error) {
      failure_ = error.text();
      return;
    }
    const std::vector<std::int64_t> asked = std::exchange(asked_, {});
    for (std::size_t i = 0; i < asked.size(); ++i) take_up(asked[i], answers[i]);
    std::erase_if(open_, [](const PromptState* state) { return state->group == nullptr; });
  }
  if (!asked_.empty() || ended_.empty()) return;
  for (const EndedTurn& turn : ended_) asked_.push_back(turn.response);
  settings_.turns->ask(std::exchange(ended_, {}));
  asked_at_ = report_.decode_steps;
}

void Generation::take_up(std::int64_t index, const NextTurn& next) {
  Response& one = response(index);
  const Rollout& rollout = result(index);
  one.waits = false;
  --waiting_;
  if (next.done) return finish(index, Finish::done);
  if (rollout.length() == one.limit) return finish(index, Finish::length);
  if (one.turns == settings_.most_turns) return finish(index, Finish::turns);
  if (next.history) return take_history(index, *next.history);
  observe(index, next.observation_ids);
}

// Appends the series of `count` further tokens that the model did not sample.
void Generation::add_silent(Rollout& rollout, std::int64_t count) const {
  const std::size_t size = rollout.loss_mask.size() + static_cast<std::size_t>(count);
  rollout.rollout_logprobs.resize(size, 0.0);
  rollout.loss_mask.resize(size, 0);
  if (!keeps_sets_) return;
  rollout.full_logprobs.resize(size, 0.0);
  for (std::int64_t t = 0; t < count; ++t) add_kept_set(rollout.kept_sets, {});
}

void Generation::clear_series(Rollout& rollout) {
  rollout.rollout_logprobs.clear(), rollout.loss_mask.clear(), rollout.full_logprobs.clear();
  rollout.kept_sets = {};
}

// Tokens without loss, and then the next turn.
void Generation::observe(std::int64_t index, std::span<const std::int32_t> ids) {
  Response& one = response(index);
  Rollout& rollout = result(index);
  const auto count = std::ssize(ids);
  if (rollout.length() + count >= one.limit) return finish(index, Finish::length);
  rollout.response_ids.insert(rollout.response_ids.end(), ids.begin(), ids.end());
  add_silent(rollout, count);
  one.pending += count, one.turn_begin = rollout.response_length();
  report_.observation_tokens += count, done_ += count;
  keep_rows(index);
}

// The trajectory goes on from `history`. What it has in common with the tokens so far stays.
void Generation::take_history(std::int64_t index, std::span<const std::int32_t> history) {
  Response& one = response(index);
  Rollout& rollout = result(index);
  std::int64_t common = 0;
  const std::int64_t shorter = std::min<std::int64_t>(std::ssize(history), rollout.length());
  while (common < shorter &&
         history[static_cast<std::size_t>(common)] == rollout.token_at(static_cast<std::int32_t>(common)))
    ++common;
  if (common == rollout.length()) return observe(index, history.subspan(static_cast<std::size_t>(common)));
  if (std::ssize(history) >= one.limit) return finish(index, Finish::length);
  Rollout record = record_of(index);
  add_carried(record.carried, "finish_reason", kRendered);
  one.earlier.push_back(std::move(record));
  one.first_turn = one.turns;
  report_.observation_tokens += std::ssize(history) - common;
  const std::int64_t prompt = rollout.prompt_length(), run = rollout.response_length() - one.pending;
  const std::int64_t rows = std::min({run, common - prompt, std::ssize(history) - prompt - 1});
  if (rows < 0 || (one.has_run && !one.state->group->keep_first(index, rows))) return move_to(index, history);
  clear_series(rollout);
  rollout.response_ids.assign(history.begin() + prompt, history.end());
  add_silent(rollout, rollout.response_length());
  one.rendered = one.turn_begin = rollout.response_length();
  one.pending = rollout.response_length() - rows;
  keep_rows(index);
}

// The history is the prompt of a group of its own.
void Generation::move_to(std::int64_t index, std::span<const std::int32_t> history) {
  Response& one = response(index);
  Rollout& rollout = result(index);
  PromptState& left = *one.state;
  if (one.has_run) left.group->remove(index);
  --live_;
  if (++left.finished == left.responses.size()) left.group.reset();
  histories_.push_back(std::make_unique<PromptState>());
  PromptState& state = *histories_.back();
  state.history.assign(history.begin(), history.end());
  state.ids = state.history;
  state.where = left.where, state.dp_rank = left.dp_rank;
  state.responses = {index};
  state.places = 1, state.longest = one.limit - state.prompt_rows();
  rollout.prompt_ids = state.history;
  rollout.response_ids.clear();
  clear_series(rollout);
  one.state = &state, one.has_run = false;
  one.pending = one.turn_begin = one.rendered = 0;
  moved_.push_back(&state);
}

// The trajectory's newest record. The text of its first prompt is not that of a history.
Rollout Generation::record_of(std::int64_t index) const {
  const Response& one = responses_[static_cast<std::size_t>(index)];
  Rollout out = results_[static_cast<std::size_t>(index)];
  out.trajectory = std::to_string(index), out.turn = one.first_turn;
  const auto rendered = static_cast<std::ptrdiff_t>(one.rendered);
  out.prompt_ids.insert(out.prompt_ids.end(), out.response_ids.begin(), out.response_ids.begin() + rendered);
  out.response_ids.erase(out.response_ids.begin(), out.response_ids.begin() + rendered);
  out.rollout_logprobs.erase(out.rollout_logprobs.begin(), out.rollout_logprobs.begin() + rendered);
  out.loss_mask.erase(out.loss_mask.begin(), out.loss_mask.begin() + rendered);
  if (!out.full_logprobs.empty())
    out.full_logprobs.erase(out.full_logprobs.begin(), out.full_logprobs.begin() + rendered);
  if (!out.kept_sets.empty())  // rendered tokens have none
    out.kept_sets.begin.erase(out.kept_sets.begin.begin(), out.kept_sets.begin.begin() + rendered);
  if (one.first_turn == 0 || out.carried.empty()) return out;
  std::string carried;
  JsonMembers members(out.carried);
  for (std::string_view key, value; members.next(key, value);)
    if (const std::string_view name = key.substr(1, key.size() - 2); name != "prompt" && name != "messages")
      add_carried(carried, name, value);
  out.carried = std::move(carried);
  return out;
}

// The records of each response, on every rank.
std::vector<std::vector<Rollout>> Generation::all_records() {
  std::vector<std::vector<Rollout>> out(results_.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = std::move(responses_[i].earlier);
    out[i].push_back(settings_.renders ? record_of(static_cast<std::int64_t>(i)) : std::move(results_[i]));
  }
  Group& dp = decoder_.mesh().dp;
  if (!settings_.renders || dp.size() == 1) return out;
  Json own = Json::array();
  for (std::size_t i = 0; i < out.size(); ++i)
    for (const Rollout& record : out[i])
      if (own_[i])
        own.push_back({i, record.prompt_ids, record.response_ids, record.loss_mask, record.rollout_logprobs,
                       *record.turn, record.carried, record.full_logprobs, record.kept_sets.begin,
                       record.kept_sets.ids});
  for (std::size_t i = 0; i < out.size(); ++i) out[i].clear();
  for (int rank = 0; rank < dp.size(); ++rank)
    for (const Json& told : Json::parse(text_of_rank(dp, own.dump(), rank))) {
      const auto index = told[0].get<std::size_t>();
      Rollout record = results_[index];
      record.trajectory = std::to_string(index);
      told[1].get_to(record.prompt_ids), told[2].get_to(record.response_ids), told[3].get_to(record.loss_mask);
      told[4].get_to(record.rollout_logprobs);
      record.turn = told[5].get<std::int64_t>(), record.carried = told[6].get<std::string>();
      told[7].get_to(record.full_logprobs);
      told[8].get_to(record.kept_sets.begin), told[9].get_to(record.kept_sets.ids);
      out[index].push_back(std::move(record));
    }
  return out;
}

}  // namespace espalier::generation
