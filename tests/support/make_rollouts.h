// Rollouts for tests, made from a seed: every shape a real file has, and the ones that only a bad day has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/rollout/rollout.h"

namespace espalier::testing {

struct IntRange {
  std::int64_t low = 0, high = 0;  // both included
};

enum class PolicyAge {
  none,      // no log-prob series
  near_old,  // old, ref and rollout log-probs within about 0.1 of one another
  far,       // about 1 apart: clipping and truncation act
};

struct RolloutOptions {
  std::int64_t groups = 4;
  IntRange group_size = {1, 4};
  IntRange prompt_length = {1, 12};
  IntRange response_length = {1, 10};
  std::int64_t vocabulary = 50;
  bool shuffled = false;     // rollouts of a group anywhere in the batch
  bool named_groups = true;  // false: no `group`, equal prompts form one

  double one_token_prompt = 0;  // chances per group
  double nested_prompt = 0;     // the prompt continues that of an earlier group
  double late_difference = 0;   // the prompt is an earlier one but for its last tokens
  double empty_response = 0;    // chances per rollout
  double equal_response = 0;    // a copy of an earlier response of the group
  double shared_start = 0;      // the response begins like an earlier one
  double continues = 0;         // the response continues the whole of an earlier one (an agent's next turn)
  double mask_gap = 0;          // a run of the mask is 0
  double fully_masked = 0;
  double kept_sets = 0;  // most tokens have a kept set; siblings have equal ones at some of the tokens where they part

  PolicyAge policy = PolicyAge::none;
  bool rewards = true;
  bool token_advantages = false;  // given, one per token
  bool values = false;            // values and returns
  double temperature_low = 1, temperature_high = 1;
  std::int64_t steps = 0;  // groups are spread over steps 1..steps; 0: no step
};

// The same options and seed give the same rollouts on every machine. `index` and `where` are as in a file
// "generated.jsonl" with one record a line.
std::vector<Rollout> make_rollouts(const RolloutOptions& options, std::uint64_t seed);

// Options drawn from the seed, over everything above; batches of at most `most_rollouts` rollouts.
RolloutOptions any_options(std::uint64_t seed, std::int64_t most_rollouts = 24);

// Writes the neutral format.
void write_jsonl(const std::string& path, const std::vector<Rollout>& rollouts);

}  // namespace espalier::testing
