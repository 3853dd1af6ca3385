#include "espalier/doctor/record_faults.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/trajectories.h"

namespace espalier {
namespace {

using Rows = std::vector<std::int64_t>;

const Rollout& at(std::span<const Rollout> rollouts, std::int64_t index) {
  return rollouts[static_cast<std::size_t>(index)];
}

std::int64_t loss_tokens(const Rollout& rollout) {
  return std::count(rollout.loss_mask.begin(), rollout.loss_mask.end(), std::uint8_t{1});
}

// Rollouts of one optimizer step: of one `step` where all have one, else all.
std::vector<Rows> steps_of(std::span<const Rollout> rollouts) {
  std::map<std::int64_t, Rows> steps;
  const bool stepped = all_have_step(rollouts);
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    steps[stepped ? *rollouts[i].step : 0].push_back(static_cast<std::int64_t>(i));
  std::vector<Rows> out;
  for (auto& [step, rows] : steps) out.push_back(std::move(rows));
  return out;
}

// ---- divisors --------------------------------------------------------------------------------------------------

struct Count {
  const char* what;
  double of_rollout;
};

// Numbers that trainers are known to have divided by in place of the loss tokens.
std::array<Count, 4> wrong_counts(const Rollout& rollout) {
  const auto loss = static_cast<double>(loss_tokens(rollout));
  return {{{"tokens of the responses, those without loss included", static_cast<double>(rollout.response_length())},
           {"tokens with loss, and one for each record without any", std::max(loss, 1.0)},
           {"tokens of prompts and responses", static_cast<double>(rollout.length())},
           {"records", 1.0}}};
}

void look_at_divisor(std::span<const Rollout> rollouts, const Rows& rows, double recorded, const char* field,
                     std::vector<Finding>& out) {
  double right = 0;
  std::array<double, 4> wrong{};
  Rows differing;
  for (const std::int64_t index : rows) {
    const auto loss = static_cast<double>(loss_tokens(at(rollouts, index)));
    right += loss;
    const auto counts = wrong_counts(at(rollouts, index));
    bool differs = false;
    for (std::size_t c = 0; c < counts.size(); ++c) {
      wrong[c] += counts[c].of_rollout;
      differs = differs || (c < 2 && counts[c].of_rollout != loss);
    }
    if (differs) differing.push_back(index);
  }
  // Counts are whole numbers; a recorded one may have passed through float32.
  const auto same = [](double a, double b) { return std::abs(a - b) <= 0.5e-6 * std::max(std::abs(a), std::abs(b)); };
  if (same(recorded, right)) return;
  for (std::size_t c = 0; c < wrong.size(); ++c)
    if (same(recorded, wrong[c])) {
      out.push_back({Fault::wrong_divisor, Sure::certain, differing.empty() ? rows : differing,
                     text_of(field, " is ", recorded, ": the ", wrong_counts(at(rollouts, rows.front()))[c].what, ". ",
                             right, " tokens have loss, so the loss is ", right / recorded, " of the token mean")});
      return;
    }
}

void look_at_divisors(std::span<const Rollout> rollouts, std::vector<Finding>& out) {
  for (const Rows& rows : steps_of(rollouts)) {
    const bool divided =
        std::ranges::all_of(rows, [&](std::int64_t i) { return at(rollouts, i).token_divisor.has_value(); });
    double sum = 0;
    if (divided)
      for (const std::int64_t index : rows) sum += *at(rollouts, index).token_divisor;
    if (divided) look_at_divisor(rollouts, rows, sum, "the sum of token_divisor", out);
    const std::optional<double> items = at(rollouts, rows.front()).num_items_in_batch;
    const bool one =
        items && std::ranges::all_of(rows, [&](std::int64_t i) { return at(rollouts, i).num_items_in_batch == items; });
    if (one) look_at_divisor(rollouts, rows, *items, "num_items_in_batch", out);
  }
}

// ---- advantages ------------------------------------------------------------------------------------------------

// The advantage of all loss tokens of a record, if it is one number.
std::optional<double> one_advantage(const Rollout& rollout) {
  std::optional<double> out;
  for (std::size_t t = 0; t < rollout.advantages.size(); ++t) {
    if (rollout.loss_mask[t] == 0) continue;
    if (out && *out != rollout.advantages[t]) return {};
    out = rollout.advantages[t];
  }
  return out;
}

// The parts of a record with loss that observations separate: [begin, end) of the response.
std::vector<std::pair<std::size_t, std::size_t>> turns_within(const Rollout& rollout) {
  std::vector<std::pair<std::size_t, std::size_t>> out;
  for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t) {
    if (rollout.loss_mask[t] == 0) continue;
    if (t == 0 || rollout.loss_mask[t - 1] == 0) out.emplace_back(t, t);
    out.back().second = t + 1;
  }
  return out;
}

bool zero_within(const Rollout& rollout, std::size_t begin, std::size_t end) {
  for (std::size_t t = begin; t < end; ++t)
    if (rollout.loss_mask[t] != 0 && rollout.advantages[t] != 0) return false;
  return true;
}

void look_at_zero_advantages(std::span<const Rollout> rollouts, const Trajectories& trajectories,
                             std::vector<Finding>& out) {
  Rows rows;
  std::int64_t turns = 0, of = 0;
  const auto parts = [&](std::int64_t index) {
    const Rollout& rollout = at(rollouts, index);
    std::int64_t zeros = 0, all = 0;
    if (!rollout.advantages.empty())
      for (const auto& [begin, end] : turns_within(rollout)) zeros += zero_within(rollout, begin, end), ++all;
    return std::pair{zeros, all};
  };
  for (const Rows& trajectory : trajectories.turns) {
    std::int64_t zeros = 0, all = 0;
    for (const std::int64_t index : trajectory) zeros += parts(index).first, all += parts(index).second;
    if (zeros == 0 || zeros == all) continue;
    turns += zeros, of += all;
    for (const std::int64_t index : trajectory)
      if (parts(index).first > 0) rows.push_back(index);
  }
  if (rows.empty()) return;
  std::ranges::sort(rows);
  out.push_back({Fault::zero_advantages, Sure::likely, rows,
                 text_of(turns, " of ", of,
                         " turns have recorded advantages of 0 at all tokens with loss, beside other "
                         "turns of their trajectories: they do not train")});
}

double deviation(const std::vector<double>& values, double mean) {
  if (values.size() < 2) return 1;
  double sum = 0;
  for (const double value : values) sum += (value - mean) * (value - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

enum class Rule { grpo, dr_grpo, rloo };

double advantage_of(Rule rule, double reward, const std::vector<double>& votes) {
  const auto n = static_cast<double>(votes.size());
  const double mean = n < 2 ? 0 : std::accumulate(votes.begin(), votes.end(), 0.0) / n;
  if (rule == Rule::rloo) return n < 2 ? reward : n / (n - 1) * (reward - mean);
  return rule == Rule::dr_grpo ? reward - mean : (reward - mean) / (deviation(votes, mean) + 1e-6);
}

// Finds recorded advantages that come from a mean over records, and not from a mean over trajectories.
void look_at_votes(std::span<const Rollout> rollouts, const Trajectories& trajectories, std::vector<Finding>& out) {
  if (!trajectories.any()) return;
  struct Member {
    std::int64_t row;
    double advantage, reward;
  };
  std::map<std::int64_t, std::vector<Member>> groups;
  const std::vector<std::int64_t> group = group_of(rollouts);
  for (const Rows& trajectory : trajectories.turns)
    for (const std::int64_t index : trajectory) {
      const Rollout& rollout = at(rollouts, index);
      const std::optional<double> advantage = one_advantage(rollout);
      if (!advantage || !rollout.reward || rollout.reward != at(rollouts, trajectory.front()).reward) return;
      groups[group[static_cast<std::size_t>(trajectory.front())]].push_back({index, *advantage, *rollout.reward});
    }
  for (const Rule rule : {Rule::grpo, Rule::dr_grpo, Rule::rloo}) {
    bool by_record = true;
    double farthest = 0;
    Rows rows;
    for (const auto& [number, members] : groups) {
      std::vector<double> records, runs;
      for (const Member& member : members) {
        records.push_back(member.reward);
        const auto& turns =
            trajectories.turns[static_cast<std::size_t>(trajectories.of[static_cast<std::size_t>(member.row)])];
        if (turns.front() == member.row) runs.push_back(member.reward);
      }
      for (const Member& member : members) {
        const double found = advantage_of(rule, member.reward, records),
                     right = advantage_of(rule, member.reward, runs);
        // float32 statistics: 1e-5 covers their rounding for groups of thousands.
        by_record = by_record && std::abs(found - member.advantage) <= 1e-5 * std::max(1.0, std::abs(found));
        if (std::abs(right - member.advantage) > 1e-3 * std::max(1.0, std::abs(right))) rows.push_back(member.row);
        farthest = std::max(farthest, std::abs(right - member.advantage));
      }
    }
    if (!by_record || rows.empty()) continue;
    std::ranges::sort(rows);
    constexpr std::array<const char*, 3> kNames = {"grpo", "dr_grpo", "rloo"};
    out.push_back(
        {Fault::votes_per_record, Sure::certain, rows,
         text_of("the recorded advantages are ", kNames[static_cast<std::size_t>(rule)],
                 "'s with a vote for each record; with a vote for each trajectory they differ by up to ", farthest)});
    return;
  }
}

// ---- marks in the fields that are carried ----------------------------------------------------------------------

std::string lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

template <class Visit>
void for_each_mark(const Json& fields, const Visit& visit) {
  for (const auto& [name, value] : fields.items()) {
    visit(lower(name), value);
    if (value.is_object()) for_each_mark(value, visit);
  }
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

bool marks_evaluation(const std::string& name, const Json& value) {
  if (value.is_boolean() || value.is_number_integer()) {
    const bool set = value == true || value == 1;
    if (is_one_of(name, {"eval", "is_eval", "evaluation", "is_evaluation", "validate", "is_validate", "validation",
                         "is_validation", "is_val", "is_test"}))
      return set;
    return is_one_of(name, {"is_train", "is_training"}) && (value == false || value == 0);
  }
  return value.is_string() && is_one_of(name, {"split", "mode", "phase", "stage", "purpose"}) &&
         is_one_of(lower(value.get<std::string>()),
                   {"eval", "evaluation", "val", "valid", "validation", "dev", "test"});
}

void look_at_evaluation(std::span<const Rollout> rollouts, const std::vector<Json>& carried,
                        std::vector<Finding>& out) {
  Rows rows;
  std::string mark;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    bool marked = false;
    for_each_mark(carried[i], [&](const std::string& name, const Json& value) {
      if (!marks_evaluation(name, value)) return;
      marked = true;
      if (mark.empty()) mark = name + " " + value.dump();
    });
    if (marked) rows.push_back(static_cast<std::int64_t>(i));
  }
  if (!rows.empty())
    out.push_back(
        {Fault::evaluation_rows, Sure::certain, rows,
         text_of(rows.size(), " of ", rollouts.size(), " rows say that they are of an evaluation (", mark, ")")});
}

struct Versions {
  double oldest = std::numeric_limits<double>::infinity(), newest = -std::numeric_limits<double>::infinity();
  bool any() const { return oldest <= newest; }
  void add(const Json& value) {
    if (value.is_array()) {
      for (const Json& one : value) add(one);
    } else if (value.is_number() && value.get<double>() >= 0) {
      oldest = std::min(oldest, value.get<double>()), newest = std::max(newest, value.get<double>());
    } else if (value.is_string()) {  // slime's weight_versions are texts
      const std::string text = value.get<std::string>();
      if (!text.empty() && text.size() < 10 &&
          std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c); }))
        add(Json(std::stod(text)));
    }
  }
};

bool names_version(std::string_view name) {
  if (is_one_of(name, {"format_version", "version", "schema_version", "transformers_version"})) return false;
  return name.ends_with("version") || name.ends_with("versions") || name.ends_with("version_start") ||
         name.ends_with("version_end");
}

// Asynchronous trainers sample with weights a step old; more is what their limits of staleness are for.
void look_at_versions(std::span<const Rollout> rollouts, const std::vector<Json>& carried, std::vector<Finding>& out) {
  constexpr double kUsualLag = 1;
  std::vector<Versions> versions(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    for_each_mark(carried[i], [&](const std::string& name, const Json& value) {
      if (names_version(name)) versions[i].add(value);
    });
  Rows rows;
  double lag = 0;
  std::int64_t mixed = 0;
  for (const Rows& step : steps_of(rollouts)) {
    double newest = 0, oldest = std::numeric_limits<double>::infinity();
    for (const std::int64_t index : step) {
      const Versions& own = versions[static_cast<std::size_t>(index)];
      if (own.any()) newest = std::max(newest, own.newest), oldest = std::min(oldest, own.oldest);
    }
    // The policy of step s has had s or s - 1 updates, by how steps are counted.
    const std::optional<std::int64_t> number = at(rollouts, step.front()).step;
    if (all_have_step(rollouts) && number && newest <= static_cast<double>(*number))
      newest = std::max(newest, static_cast<double>(*number) - 1);
    for (const std::int64_t index : step) {
      const Versions& own = versions[static_cast<std::size_t>(index)];
      if (!own.any()) continue;
      const bool several = own.newest > own.oldest;
      if (newest - own.oldest <= kUsualLag && !several) continue;
      rows.push_back(index), mixed += several, lag = std::max(lag, newest - own.oldest);
    }
  }
  if (rows.empty()) return;
  std::ranges::sort(rows);
  std::string text =
      text_of(rows.size(), " rows have tokens of weights up to ", lag, " versions older than the newest");
  if (mixed > 0) text += text_of("; ", mixed, " have tokens of several versions");
  out.push_back({Fault::stale_policy, Sure::certain, rows, text});
}

// ---- series of zeros -------------------------------------------------------------------------------------------

// A sampler that keeps one token gives it 0; that it does so at every token of a response is a series that was not
// filled.
void look_at_zero_logprobs(std::span<const Rollout> rollouts, std::vector<Finding>& out) {
  constexpr std::int64_t kFewest = 8;
  for (const auto& [name, series] :
       {std::pair{"rollout_logprobs", &Rollout::rollout_logprobs}, std::pair{"old_logprobs", &Rollout::old_logprobs}}) {
    Rows rows;
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      const std::vector<double>& values = rollouts[i].*series;
      bool zero = !values.empty() && rollouts[i].kept_sets.empty() && loss_tokens(rollouts[i]) >= kFewest;
      for (std::size_t t = 0; t < values.size(); ++t) zero = zero && (rollouts[i].loss_mask[t] == 0 || values[t] == 0);
      if (zero) rows.push_back(static_cast<std::int64_t>(i)), tokens += loss_tokens(rollouts[i]);
    }
    if (!rows.empty())
      out.push_back({Fault::unrecorded_logprobs, Sure::likely, rows,
                     text_of(name, " are exactly 0 at all ", tokens, " tokens with loss of these rows")});
  }
}

// ---- repeated tokens -------------------------------------------------------------------------------------------

std::int32_t common_length(const Rollout& a, const Rollout& b) {
  const std::int32_t shorter = std::min(a.length(), b.length());
  std::int32_t depth = 0;
  while (depth < shorter && a.token_at(depth) == b.token_at(depth)) ++depth;
  return depth;
}

bool has_loss(const Rollout& rollout, std::int32_t depth) {
  const std::int32_t position = depth - rollout.prompt_length();
  return position >= 0 && rollout.loss_mask[static_cast<std::size_t>(position)] != 0;
}

struct Repeat {
  std::int64_t tokens = 0;
  double log_probability = 0;  // that two samples share them
  bool known = true;
};

Repeat repeat_of(const Rollout& a, const Rollout& b, std::span<const double> logprobs_a,
                 std::span<const double> logprobs_b) {
  Repeat out;
  const std::int32_t common = common_length(a, b);
  for (std::int32_t depth = std::min(a.prompt_length(), b.prompt_length()); depth < common; ++depth) {
    if (!has_loss(a, depth) || !has_loss(b, depth)) continue;
    ++out.tokens;
    const auto probability = [&](const Rollout& rollout, std::span<const double> logprobs) {
      return logprobs.empty() ? 1.0 : logprobs[static_cast<std::size_t>(depth - rollout.prompt_length())];
    };
    // The larger of the two, since the series may be of another policy or set.
    const double pa = probability(a, logprobs_a), pb = probability(b, logprobs_b);
    const double larger = pa > 0 ? pb : pb > 0 ? pa : std::max(pa, pb);
    if (larger > 0 || !std::isfinite(larger))
      out.known = false;
    else
      out.log_probability += larger;
  }
  return out;
}

bool tokens_before(const Rollout& a, const Rollout& b) {
  const std::int32_t common = common_length(a, b);
  if (common == std::min(a.length(), b.length())) return a.length() < b.length();
  return a.token_at(common) < b.token_at(common);
}

// Branches of one trajectory are settled by --shared-tokens.
bool settled(const Rollout& a, const Rollout& b) {
  return !a.branch.empty() && !b.branch.empty() && a.branch != b.branch;
}

}  // namespace

std::vector<Finding> record_faults(std::span<const Rollout> rollouts) {
  std::vector<Finding> out;
  if (std::ranges::any_of(rollouts, [](const Rollout& rollout) { return rollout.pair.pair >= 0; })) return out;
  std::vector<Json> carried;
  for (const Rollout& rollout : rollouts)
    carried.push_back(rollout.carried.empty() ? Json::object() : Json::parse(rollout.carried));
  const Trajectories trajectories = trajectories_of(rollouts);
  look_at_divisors(rollouts, out);
  look_at_votes(rollouts, trajectories, out);
  look_at_zero_advantages(rollouts, trajectories, out);
  look_at_evaluation(rollouts, carried, out);
  look_at_versions(rollouts, carried, out);
  look_at_zero_logprobs(rollouts, out);
  return out;
}

std::vector<Finding> repeated_tokens(std::span<const Rollout> rollouts, std::span<const std::vector<double>> logprobs) {
  const double unlikely = std::log(1e-6);
  const std::vector<std::int64_t> trajectory = trajectories_of(rollouts).of;
  Rows rows;
  std::int64_t tokens = 0;
  bool unknown = false, certain = false;
  for (Rows step : steps_of(rollouts)) {
    std::ranges::stable_sort(
        step, [&](std::int64_t a, std::int64_t b) { return tokens_before(at(rollouts, a), at(rollouts, b)); });
    const auto n = static_cast<double>(step.size());
    const double pairs = std::log(std::max(1.0, n * (n - 1) / 2));
    for (std::size_t k = 1; k < step.size(); ++k) {
      const Rollout &a = at(rollouts, step[k - 1]), &b = at(rollouts, step[k]);
      if (a.pair.pair >= 0) continue;
      const auto of = [&](std::int64_t row) {
        return std::span<const double>(logprobs[static_cast<std::size_t>(row)]);
      };
      const Repeat repeat = repeat_of(a, b, of(step[k - 1]), of(step[k]));
      if (repeat.tokens == 0) continue;
      const bool same =
          trajectory[static_cast<std::size_t>(step[k - 1])] == trajectory[static_cast<std::size_t>(step[k])];
      if (same && settled(a, b)) continue;
      const bool improbable = repeat.known && repeat.log_probability + pairs < unlikely;
      if (!same && !improbable) {
        unknown = unknown || !repeat.known;
        continue;
      }
      certain = certain || improbable;
      tokens += repeat.tokens;
      rows.push_back(step[k - 1]), rows.push_back(step[k]);
    }
  }
  if (rows.empty()) return {};
  std::ranges::sort(rows);
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return {{Fault::trained_n_times, certain ? Sure::certain : Sure::likely, rows,
           text_of(tokens, " tokens with loss stand in several of these ", rows.size(),
                   " rows after equal tokens, and train in each; independent samples would not share them")}};
}

}  // namespace espalier
