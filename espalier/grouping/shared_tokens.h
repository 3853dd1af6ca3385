// Tokens that branches of one trajectory have in common: sampled once, recorded by each branch (docs/agents.md).
//
// K: the trajectory's branches. A token lies on a branch if a record of the branch has it, and the same tokens before
// it, in its prompt or its response. A record without `branch` lies on all branches. Tokens are compared, recorded
// experts are not: an engine may choose others when it reads a token again. Tokens of a trajectory without `branch`,
// and of different trajectories, were sampled apart, however equal they are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/options/choices.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Sets loss masks and shares:
//   once:    a token with loss in several records keeps it in the first of them, in the order of turns
//   average: the loss of the trajectory is the mean over its branches of the branch's loss. A token on k branches has
//            k / K of the loss, in equal parts from each record that has it with loss
//   each:    nothing changes
// Returns notes for the user. Calling it again changes nothing.
std::vector<std::string> settle_shared_tokens(std::span<Rollout> rollouts, SharedTokens choice);

// Loss tokens that a record repeats from one before it: equal, after equal tokens, with loss in both.
struct RepeatedTokens {
  std::int64_t rollout = 0, earlier = 0;  // earlier: the first record that has them
  std::int32_t tokens = 0;
};

// The repeats among `members`, whose order says which record is earlier.
std::vector<RepeatedTokens> repeated_tokens(std::span<const Rollout> rollouts, std::span<const std::int64_t> members);

}  // namespace espalier
