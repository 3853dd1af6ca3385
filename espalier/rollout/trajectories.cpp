#include "espalier/rollout/trajectories.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "espalier/base/error.h"
#include "espalier/rollout/mini_batches.h"

namespace espalier {
namespace {

using Turns = std::vector<std::int64_t>;

void order_turns(std::span<const Rollout> rollouts, Turns& turns) {
  const auto at = [&](std::int64_t index) -> const Rollout& { return rollouts[static_cast<std::size_t>(index)]; };
  const auto has_turn = [&](std::int64_t index) { return at(index).turn.has_value(); };
  const auto with = std::ranges::find_if(turns, has_turn), without = std::ranges::find_if_not(turns, has_turn);
  if (with == turns.end()) return;
  if (without != turns.end())
    throw InputError({at(*without).where + ": turn", "a turn in every record of a trajectory or in none",
                      "none here, but one at " + at(*with).where, "Complete the field or remove it"});
  std::ranges::stable_sort(turns, {}, [&](std::int64_t index) { return *at(index).turn; });
  const auto twin = std::ranges::adjacent_find(turns, {}, [&](std::int64_t index) { return *at(index).turn; });
  if (twin != turns.end())
    throw InputError({at(twin[1]).where + ": turn", "each turn of a trajectory once",
                      text_of("turn ", *at(twin[1]).turn, " of trajectory ", at(twin[1]).trajectory, " here and at ",
                              at(twin[0]).where),
                      "If an agent branches, give each branch its own trajectory; common tokens still run once"});
}

// The first two turns of a trajectory whose rewards differ; {-1, -1}: none.
std::pair<std::int64_t, std::int64_t> unequal_rewards(std::span<const Rollout> rollouts, const Turns& turns) {
  std::int64_t first = -1;
  for (const std::int64_t index : turns) {
    const auto& reward = rollouts[static_cast<std::size_t>(index)].reward;
    if (!reward) continue;
    if (first >= 0 && reward != rollouts[static_cast<std::size_t>(first)].reward) return {first, index};
    if (first < 0) first = index;
  }
  return {-1, -1};
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

std::vector<std::optional<double>> rewards_of(std::span<const Rollout> rollouts, const Trajectories& trajectories) {
  std::vector<std::optional<double>> out(trajectories.turns.size());
  for (std::size_t i = 0; i < out.size(); ++i)
    for (const std::int64_t index : trajectories.turns[i])
      if (const auto& reward = rollouts[static_cast<std::size_t>(index)].reward) out[i] = out[i].value_or(0) + *reward;
  return out;
}

std::string settle_turn_rewards(std::span<Rollout> rollouts, TurnRewards choice) {
  const Trajectories trajectories = trajectories_of(rollouts);
  const Turns* unequal = nullptr;
  bool several = false;
  for (const Turns& turns : trajectories.turns) {
    const auto rewarded = [&](std::int64_t index) {
      return rollouts[static_cast<std::size_t>(index)].reward.has_value();
    };
    several |= std::ranges::count_if(turns, rewarded) > 1;
    if (unequal == nullptr && unequal_rewards(rollouts, turns).first >= 0) unequal = &turns;
  }
  if (!several) return "";
  const char* const by_itself = choice == TurnRewards::automatic ? " (--turn-rewards auto)" : "";
  if (choice == TurnRewards::sum || (choice == TurnRewards::automatic && unequal != nullptr))
    return text_of("rewards of turns: a trajectory's reward is their sum", by_itself);
  if (unequal != nullptr) {
    const auto [one, other] = unequal_rewards(rollouts, *unequal);
    const Rollout &first = rollouts[static_cast<std::size_t>(one)], &second = rollouts[static_cast<std::size_t>(other)];
    throw InputError({second.where + ": reward",
                      text_of("the reward ", *first.reward, " of ", first.where,
                              ", another turn of the trajectory, for --turn-rewards outcome"),
                      text_of(*second.reward), "--turn-rewards sum adds the rewards of a trajectory's turns"});
  }
  for (const Turns& turns : trajectories.turns) {
    std::optional<double> outcome;
    for (const std::int64_t index : turns) {
      auto& reward = rollouts[static_cast<std::size_t>(index)].reward;
      if (reward) outcome = *reward, reward.reset();
    }
    rollouts[static_cast<std::size_t>(turns.back())].reward = outcome;
  }
  return text_of("rewards of turns: all turns of a trajectory repeat one number, its outcome, counted once", by_itself);
}

}  // namespace espalier
