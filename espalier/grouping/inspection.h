// Properties of a set of rollouts: sizes, the savings by sharing, and every anomaly.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/json_fwd.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Between two values a quantile is interpolated linearly.
struct Quantiles {
  double min = 0, p50 = 0, p95 = 0, max = 0;
};

struct Anomaly {
  std::int64_t rollout = 0;  // its place among the inspected
  std::int64_t line = 0;     // in its file
  std::string where;         // "rollouts.jsonl:17"
  std::string kind;          // prompt_differs, empty_response, duplicate_response, fully_masked, group_of_one,
                             // equal_rewards, no_signal, nothing_to_learn, partial_steps, positive_logprob,
                             // repeated_tokens, unequal_advantages, zero_advantages
  std::string text;
};

struct Inspection {
  std::int64_t rollouts = 0, groups = 0;
  std::int64_t steps = 0;            // distinct steps, 0 where records have none
  std::int64_t logical_tokens = 0;   // every rollout's prompt + response
  std::int64_t physical_tokens = 0;  // every token that two rollouts of a step have in common once
  std::int64_t loss_tokens = 0;
  Quantiles group_size, prompt_length, response_length;
  Quantiles prefix_share;           // over groups: 1 - physical / logical tokens of the group
  std::vector<std::string> series;  // fields that at least one record has: "old_logprobs (512 of 640)"
  std::vector<Anomaly> anomalies;   // in order of the rollouts

  std::int64_t trajectories = 0;  // of agents; 0 where no record has a field trajectory
  Quantiles turns;                // of a trajectory
  struct Turn {
    std::int64_t rollouts = 0, logical_tokens = 0;
    std::int64_t physical_tokens = 0;  // those that no earlier turn has
  };
  std::vector<Turn> by_turn;  // the first turns of all trajectories, the second, ...

  std::int64_t pairs = 0, lists = 0;  // sets of answers
  Quantiles answers;                  // of a set
  Quantiles set_share;                // over sets: 1 - physical / logical tokens of the set alone

  // Loss tokens equal to an earlier record's, after equal tokens: on branches of one trajectory (sampled once,
  // --shared-tokens), in other records of one trajectory, and in other rollouts of the group. The last two train each
  // time.
  struct Repeated {
    std::int64_t branches = 0, trajectory = 0, rollouts = 0;
  };
  Repeated repeated;

  double saved_share() const;  // 1 - physical / logical of all
};

Inspection inspect_rollouts(std::span<const Rollout> rollouts);

// The fields of the `inspect` verb's JSON object that depend on the rollouts.
Json inspection_json(const Inspection& inspection);

// The same for people: aligned columns, anomalies summed up by kind.
std::string inspection_text(const Inspection& inspection);

}  // namespace espalier
