// Trajectories: one run of an agent, recorded as turns. A turn is a rollout of its own, whose prompt repeats the
// history that the agent showed the model; docs/agents.md. If the run branches, turns of different branches have
// different `branch`.
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
// InputError: some turns without `turn`, or two of one branch with the same.
Trajectories trajectories_of(std::span<const Rollout> rollouts);

// The trajectory's branches that records name; one of a trajectory without branches.
std::vector<std::string> branches_of(std::span<const Rollout> rollouts, const std::vector<std::int64_t>& turns);

// The unit of the loss's sequences. `automatic`: trajectory if any record says so, else record.
LossUnit loss_unit_of(std::span<const Rollout> rollouts, LossUnit choice);

// Under `automatic`, if any record says trajectory, so do all. Returns a note for the user; "" where the unit is the
// record, or no trajectory has several. InputError: records that say different units.
std::string settle_loss_unit(std::span<Rollout> rollouts, LossUnit choice);

// The reward of each trajectory: the sum over its turns that lie on all branches, and the mean over its branches of
// the sum over the branch's turns. Branches without a reward do not count; none where no turn has one.
std::vector<std::optional<double>> rewards_of(std::span<const Rollout> rollouts, const Trajectories& trajectories);

// Changes rewards so that a trajectory's is the sum over its turns (on each of its branches): under `outcome` the
// number that its turns repeat stays with the last turn alone (of each branch); under `sum` nothing changes;
// `automatic` is `sum` as soon as the turns of one trajectory have unequal rewards, else `outcome`. Returns a note for
// the user; "" where no trajectory has several rewards. InputError: unequal rewards under `outcome`.
std::string settle_turn_rewards(std::span<Rollout> rollouts, TurnRewards choice);

}  // namespace espalier
