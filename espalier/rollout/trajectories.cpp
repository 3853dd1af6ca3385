#include "espalier/rollout/trajectories.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "espalier/base/error.h"
#include "espalier/rollout/mini_batches.h"

namespace espalier {
namespace {

using Turns = std::vector<std::int64_t>;

template <class Rollouts>
auto& at(Rollouts&& rollouts, std::int64_t index) {
  return rollouts[static_cast<std::size_t>(index)];
}

void order_turns(std::span<const Rollout> rollouts, Turns& turns) {
  const auto has_turn = [&](std::int64_t index) { return at(rollouts, index).turn.has_value(); };
  const auto with = std::ranges::find_if(turns, has_turn), without = std::ranges::find_if_not(turns, has_turn);
  if (with == turns.end()) return;
  if (without != turns.end())
    throw InputError({at(rollouts, *without).where + ": turn", "a turn in every record of a trajectory or in none",
                      "none here, but one at " + at(rollouts, *with).where, "Complete the field or remove it"});
  std::ranges::stable_sort(turns, {}, [&](std::int64_t index) { return *at(rollouts, index).turn; });
  std::map<std::pair<std::int64_t, std::string_view>, std::int64_t> known;
  for (const std::int64_t index : turns) {
    const auto [twin, is_new] = known.try_emplace({*at(rollouts, index).turn, at(rollouts, index).branch}, index);
    if (is_new) continue;
    const std::string branch = at(rollouts, index).branch.empty() ? "" : ", branch " + at(rollouts, index).branch;
    throw InputError({at(rollouts, index).where + ": turn", "each turn of a trajectory once on each branch",
                      text_of("turn ", *at(rollouts, index).turn, " of trajectory ", at(rollouts, index).trajectory,
                              branch, " here and at ", at(rollouts, twin->second).where),
                      "Number the turns. If the run branches here, keep its trajectory and add a field branch that "
                      "differs: tokens that branches have in common then train once"});
  }
}

// The turns of a trajectory that lie on one branch; all turns of a trajectory without branches.
Turns turns_on(std::span<const Rollout> rollouts, const Turns& turns, const std::string& branch) {
  Turns out;
  for (const std::int64_t index : turns)
    if (at(rollouts, index).branch.empty() || at(rollouts, index).branch == branch) out.push_back(index);
  return out;
}

// The first two turns of a trajectory whose rewards differ; {-1, -1}: none.
std::pair<std::int64_t, std::int64_t> unequal_rewards(std::span<const Rollout> rollouts, const Turns& turns) {
  std::int64_t first = -1;
  for (const std::int64_t index : turns) {
    const auto& reward = at(rollouts, index).reward;
    if (!reward) continue;
    if (first >= 0 && reward != at(rollouts, first).reward) return {first, index};
    if (first < 0) first = index;
  }
  return {-1, -1};
}

// Leaves the outcome that the turns of a branch repeat with the branch's last turn alone.
void keep_outcomes(std::span<Rollout> rollouts, const Turns& turns) {
  std::vector<std::pair<std::int64_t, std::optional<double>>> outcomes;
  for (const std::string& branch : branches_of(rollouts, turns)) {
    std::optional<double> outcome;
    std::int64_t last = -1;
    for (const std::int64_t index : turns_on(rollouts, turns, branch)) {
      if (at(rollouts, index).reward) outcome = at(rollouts, index).reward;
      if (at(rollouts, index).branch == branch) last = index;
    }
    outcomes.emplace_back(last, outcome);
  }
  for (const std::int64_t index : turns) {
    Rollout& rollout = at(rollouts, index);
    const auto kept = std::ranges::find(outcomes, index, [](const auto& outcome) { return outcome.first; });
    if (kept == outcomes.end() || !rollout.reward) rollout.token_rewards.clear();
    rollout.reward = kept == outcomes.end() ? std::nullopt : kept->second;
  }
}

}  // namespace

Trajectories trajectories_of(std::span<const Rollout> rollouts) {
  const bool by_step = all_have_step(rollouts);
  std::map<std::tuple<std::int64_t, std::string, std::string>, std::int64_t> known;
  Trajectories out;
  out.of.reserve(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    auto place = static_cast<std::int64_t>(out.turns.size());
    if (!rollout.trajectory.empty())
      place = known.try_emplace({by_step ? *rollout.step : 0, rollout.group, rollout.trajectory}, place).first->second;
    if (place == static_cast<std::int64_t>(out.turns.size())) out.turns.emplace_back();
    out.turns[static_cast<std::size_t>(place)].push_back(static_cast<std::int64_t>(i));
    out.of.push_back(place);
  }
  for (Turns& turns : out.turns)
    if (turns.size() > 1) order_turns(rollouts, turns);
  return out;
}

std::vector<std::string> branches_of(std::span<const Rollout> rollouts, const Turns& turns) {
  std::vector<std::string> out;
  for (const std::int64_t index : turns) {
    const std::string& branch = at(rollouts, index).branch;
    if (!branch.empty() && std::ranges::find(out, branch) == out.end()) out.push_back(branch);
  }
  if (out.empty()) out.emplace_back();
  return out;
}

LossUnit loss_unit_of(std::span<const Rollout> rollouts, LossUnit choice) {
  if (choice != LossUnit::automatic) return choice;
  const auto counts = [](const Rollout& rollout) { return rollout.loss_unit == LossUnit::trajectory; };
  return std::ranges::any_of(rollouts, counts) ? LossUnit::trajectory : LossUnit::record;
}

std::string settle_loss_unit(std::span<Rollout> rollouts, LossUnit choice) {
  const Rollout* first = nullptr;
  for (const Rollout& rollout : rollouts) {
    if (choice != LossUnit::automatic || !rollout.loss_unit) continue;
    if (first == nullptr) first = &rollout;
    if (rollout.loss_unit != first->loss_unit)
      throw InputError({rollout.where + ": loss_unit",
                        text_of('"', name_of(*first->loss_unit), "\", as at ", first->where, ", for --loss-unit auto"),
                        text_of('"', name_of(*rollout.loss_unit), '"'),
                        "give --loss-unit record or trajectory, or train on the files one after another"});
  }
  if (choice != LossUnit::automatic || loss_unit_of(rollouts, choice) == LossUnit::record) return "";
  for (Rollout& rollout : rollouts) rollout.loss_unit = LossUnit::trajectory;
  if (!trajectories_of(rollouts).any()) return "";
  return "loss unit: all records of a trajectory are one sequence, as the records say (--loss-unit auto)";
}

std::vector<std::optional<double>> rewards_of(std::span<const Rollout> rollouts, const Trajectories& trajectories) {
  std::vector<std::optional<double>> out(trajectories.turns.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::map<std::string_view, double> branches;
    for (const std::int64_t index : trajectories.turns[i]) {
      const Rollout& rollout = at(rollouts, index);
      if (!rollout.reward) continue;
      if (rollout.branch.empty())
        out[i] = out[i].value_or(0) + *rollout.reward;
      else
        branches[rollout.branch] += *rollout.reward;
    }
    double sum = 0;
    for (const auto& [branch, reward] : branches) sum += reward;
    if (!branches.empty()) out[i] = out[i].value_or(0) + sum / static_cast<double>(branches.size());
  }
  return out;
}

std::string settle_turn_rewards(std::span<Rollout> rollouts, TurnRewards choice) {
  const Trajectories trajectories = trajectories_of(rollouts);
  std::pair<std::int64_t, std::int64_t> unequal{-1, -1};
  bool several = false, branches = false;
  for (const Turns& turns : trajectories.turns) {
    if (turns.size() == 1) continue;
    several |=
        std::ranges::count_if(turns, [&](std::int64_t index) { return at(rollouts, index).reward.has_value(); }) > 1;
    const std::vector<std::string> names = branches_of(rollouts, turns);
    branches |= names.size() > 1;
    for (const std::string& branch : names)
      if (unequal.first < 0) unequal = unequal_rewards(rollouts, turns_on(rollouts, turns, branch));
  }
  if (!several) return "";
  const std::string read = text_of(branches ? ", averaged over its branches" : "",
                                   choice == TurnRewards::automatic ? " (--turn-rewards auto)" : "");
  if (choice == TurnRewards::sum || (choice == TurnRewards::automatic && unequal.first >= 0))
    return "rewards of turns: a trajectory's reward is their sum" + read;
  if (unequal.first >= 0) {
    const Rollout &first = at(rollouts, unequal.first), &second = at(rollouts, unequal.second);
    throw InputError({second.where + ": reward",
                      text_of("the reward ", *first.reward, " of ", first.where,
                              ", another turn of the trajectory, for --turn-rewards outcome"),
                      text_of(*second.reward), "--turn-rewards sum adds the rewards of a trajectory's turns"});
  }
  for (const Turns& turns : trajectories.turns)
    if (turns.size() > 1) keep_outcomes(rollouts, turns);
  return "rewards of turns: all turns of a trajectory repeat one number, its outcome, counted once" + read;
}

}  // namespace espalier
