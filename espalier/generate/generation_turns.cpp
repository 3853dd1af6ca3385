// The part of a call of generate() that takes answers of environments and begins further turns.
#include "espalier/generate/generation.h"

namespace espalier::generation {

// Asks about ended turns, and takes up what was asked about kStepsAhead steps ago, or now where nothing else can run.
void Generation::exchange_turns() {
  const bool anything_runs = decoding_.running() > 0;
  const std::int64_t steps = decoding_.counts().decode_steps;
  if (!asked_.empty() && (steps - asked_at_ >= kStepsAhead || !anything_runs)) {
    std::vector<NextTurn> answers;
    try {
      answers = settings_.turns->answers();
    } catch (const InputError& error) {
      failure_ = error.text();
      return;
    }
    const std::vector<std::int64_t> asked = std::exchange(asked_, {});
    for (std::size_t i = 0; i < asked.size(); ++i) take_up(asked[i], answers[i]);
  }
  if (!asked_.empty() || ended_.empty()) return;
  for (const EndedTurn& turn : ended_) asked_.push_back(turn.response);
  settings_.turns->ask(std::exchange(ended_, {}));
  asked_at_ = steps;
}

void Generation::take_up(std::int64_t index, const NextTurn& next) {
  Response& one = response(index);
  const Rollout& rollout = result(index);
  if (next.done) return finish(index, Finish::done);
  if (rollout.length() == one.limit) return finish(index, Finish::length);
  if (one.turns == settings_.most_turns) return finish(index, Finish::turns);
  if (next.history) return take_history(index, *next.history);
  observe(index, next.observation_ids);
}

// Tokens without loss, and then the next turn.
void Generation::observe(std::int64_t index, std::span<const std::int32_t> ids) {
  Response& one = response(index);
  const Rollout& rollout = result(index);
  const auto count = std::ssize(ids);
  if (rollout.length() + count >= one.limit) return finish(index, Finish::length);
  decoding_.carry_on(one.number, ids);
  one.turn_begin = rollout.response_length() + count;
  report_.observation_tokens += count, done_ += count;
}

// The trajectory goes on from `history`. Tokens that the history has in common with the tokens so far stay.
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
  const auto prompt = static_cast<std::size_t>(rollout.prompt_length());
  if (static_cast<std::size_t>(common) < prompt || history.size() <= prompt ||
      !decoding_.restart(one.number, history.subspan(prompt)))
    return move_to(index, history);
  one.rendered = one.turn_begin = std::ssize(history) - rollout.prompt_length();
}

// The history is a prompt of its own.
void Generation::move_to(std::int64_t index, std::span<const std::int32_t> history) {
  Response& one = response(index);
  DecodingRules rules = decoding_.rules(one.number);
  rules.longest = one.limit - std::ssize(history);
  of_machine_.erase(one.number);
  decoding_.remove(one.number);
  one.number = decoding_.add_first({history.begin(), history.end()}, std::move(rules), one.where);
  of_machine_[one.number] = index;
  result(index).prompt_ids.assign(history.begin(), history.end());
  one.turn_begin = one.rendered = 0;
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
