// Faults of recorded log-probs, told from what a model gives for the same tokens.
//
// Every explanation of a row (the log-probs as they should be, at another temperature, one place off, over kept sets,
// with other experts) predicts its recorded log-probs. An explanation holds for a row if its mean distance is within
// what rounding allows: twice the mean distance between a bfloat16 and a float32 run of the same rows, since a sampler
// rounds at the same places, with three standard errors of a mean of so many tokens on top. A row whose log-probs hold
// as they should be is sound.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "espalier/doctor/finding.h"
#include "espalier/doctor/probe.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// Temperatures that people set, for ProbeWish::temperatures.
std::vector<double> usual_temperatures();
inline constexpr std::int64_t kProbedTokens = 512;  // for ProbeWish::top

struct Replayed {
  std::span<const Rollout> rollouts;  // the sample; `index` is a rollout's place in the dump
  const Probe& probe;                 // with usual_temperatures() and kProbedTokens
  const Probe& rounded;               // the same rollouts in bfloat16
  // The same rollouts with other recorded experts; null: nothing is recorded.
  std::function<Probe(const std::vector<Rollout>&)> again;
};

// other_temperature, shifted_logprobs, kept_sets_missing, shifted_routes, stale_routes, stale_policy and
// unexplained_logprobs, of rollout_logprobs and old_logprobs.
std::vector<Finding> logprob_faults(const Replayed& replayed);

// evaluation_rows: responses of which every token is the most likely one, beside others that were sampled, where that
// has a probability of less than one in a million.
std::vector<Finding> greedy_rows(const Replayed& replayed);

}  // namespace espalier
