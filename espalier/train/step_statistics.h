// Numbers of a step that say whether its rollouts can teach anything, and how fast the machine was: fields of
// metrics.jsonl beside step_json's.
#pragma once

#include <span>

#include "espalier/base/json.h"
#include "espalier/forecast/cost_model.h"
#include "espalier/rollout/rollout.h"
#include "espalier/step/step.h"

namespace espalier {

// Fields, each only where the records have what it needs:
//   groups, groups_without_variance   groups with rewards; those whose rewards are all equal
//   reward_spread {std, min, max}     the mean over groups of the deviation (Bessel-corrected); the extremes
//   truncated                         share of the rollouts with a finish_reason whose finish_reason is "length"
//   ratio_histogram {edges, counts}   exp(logprob - old_logprob) of loss tokens: counts[i] in [edges[i - 1], edges[i])
//   tokens_per_second                 tokens of prompts and responses, each rollout's own, over seconds.total
//   mfu                               FLOPs of the plan over its measured phases and this machine's best product rate
Json step_statistics(const StepReport& report, std::span<const Rollout> rollouts, const MachineProfile& machine);

}  // namespace espalier
