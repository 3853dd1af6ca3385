// Trajectories: one run of an agent, recorded as turns. A turn is a rollout of its own, whose prompt repeats the
// history that the agent showed the model; docs/agents.md.
//
// A rollout without a field `trajectory` is a trajectory of one turn, so all that follows holds for every file.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "espalier/options/choices.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct Trajectories {
  std::vector<std::int64_t> of;                  // one per rollout: its trajectory
  std::vector<std::vector<std::int64_t>> turns;  // one per trajectory: its rollouts, the first turn first

  bool any() const { return turns.size() < of.size(); }  // some trajectory has several turns
};

// Rollouts with equal `trajectory` and `group` (and `step`, where all have one) are one trajectory; trajectories in
// order of first appearance. Turns are ordered by `turn`, or as they stand where no record of the trajectory has one.
// InputError: some turns without `turn`, or two with the same.
Trajectories trajectories_of(std::span<const Rollout> rollouts);

// The reward of each trajectory, the sum over its turns; none where no turn has one.
std::vector<std::optional<double>> rewards_of(std::span<const Rollout> rollouts, const Trajectories& trajectories);

// Changes rewards so that a trajectory's is the sum over its turns: under `outcome` the number that its turns repeat
// stays with the last turn alone; under `sum` nothing changes; `automatic` is `sum` as soon as the turns of one
// trajectory have unequal rewards, else `outcome`. Returns a note for the user; "" where no trajectory has several
// rewards. InputError: unequal rewards under `outcome`.
std::string settle_turn_rewards(std::span<Rollout> rollouts, TurnRewards choice);

}  // namespace espalier
