// Changes to rewards and groups before advantages are computed. Source: DAPO (Yu and others, 2025), with verl
// 0.9's conventions.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier {

// DAPO's soft overlong punishment, to be added to the reward, in [-factor, 0]. With l tokens of a response, the limit
// and the buffer before it:
//
//   min(0, -factor (l - (limit - buffer)) / buffer);      0 where buffer is 0
double overlong_penalty(std::int64_t response_length, std::int64_t limit, std::int64_t buffer, double factor);

// Appends the groups of `rollouts` whose rewards, of those that have one, are not all equal to `kept`, in order, until
// it holds `most` groups. A group is a run of neighbouring rollouts with equal `group`. Returns the number of groups
// with equal rewards.
std::int64_t keep_unequal_groups(std::vector<Rollout> rollouts, std::int64_t most, std::vector<Rollout>& kept);

// The number of runs of neighbouring rollouts with equal `group`.
std::int64_t count_groups(const std::vector<Rollout>& rollouts);

}  // namespace espalier
