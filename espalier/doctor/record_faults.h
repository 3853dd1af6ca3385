// Faults that the records of a dump show by themselves.
#pragma once

#include <span>
#include <vector>

#include "espalier/doctor/finding.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

// wrong_divisor, votes_per_record, zero_advantages, evaluation_rows, stale_policy by recorded versions, and
// unrecorded_logprobs.
std::vector<Finding> record_faults(std::span<const Rollout> rollouts);

// trained_n_times: loss tokens of several records of a step, after equal tokens, that independent samples would not
// share. `logprobs`: of the response tokens of each rollout, under the sampler; empty where they are not known, and
// then only records of one trajectory are judged. Independent samples from one context share a beginning with at most
// the probability of its tokens; over all pairs of records that is less than one in a million for what is found.
std::vector<Finding> repeated_tokens(std::span<const Rollout> rollouts, std::span<const std::vector<double>> logprobs);

}  // namespace espalier
