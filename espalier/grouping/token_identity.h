// Equality of tokens of rollouts: equal ids and, if experts were recorded, equal experts in every layer. A token with a
// record differs from one without.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier {

// A number for every token of some rollouts; equal numbers are equal tokens. Without records they are the ids
// themselves, and nothing is copied. Time and memory O(tokens x record) with them.
class TokenIdentity {
 public:
  explicit TokenIdentity(std::span<const Rollout> rollouts);

  std::int32_t at(std::int32_t rollout, std::int32_t depth) const { return run_at(rollout, depth).front(); }
  // The numbers from `depth` on that lie end to end in memory; at least one.
  std::span<const std::int32_t> run_at(std::int32_t rollout, std::int32_t depth) const;

 private:
  std::span<const Rollout> rollouts_;
  std::vector<std::vector<std::int32_t>> numbers_;  // by rollout; empty: no rollout has a record
};

// Equal prompts, token by token.
bool same_prompt(const Rollout& a, const Rollout& b);

}  // namespace espalier
