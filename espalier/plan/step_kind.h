// Properties of a step beyond its rows: found here, from options, model and rollouts, for the planner and the
// engine.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/options/options.h"
#include "espalier/plan/model_shape.h"
#include "espalier/rollout/rollout.h"

namespace espalier {

struct StepKind {
  bool gradients = true;       // false: forward only
  bool optimizer = true;       // moments, and masters in bfloat16, are held
  bool whole_rollout = false;  // the objective's derivative needs whole rollouts: the head runs again in the backward
  std::int64_t beside_bytes = 0;      // held by other models of the process
  bool all_rows_choose = false;       // router losses or whole loads: a last layer of experts runs all rows
  bool counting_pass = false;         // a forward pass for the routers' choices comes first
  bool counts_rollouts = false;       // router losses by rollout: ranks that divide one join its choices
  bool cuda = false;                  // on a GPU: its context and libraries are held in place of the process
  bool queued = false;                // its work waits in queues: the head computes a block of logits ahead
  bool writes_sums = false;           // its products do (ops/products.h)
  std::int64_t optimizer_shares = 1;  // ranks that keep a share each of what `optimizer` stands for
  std::int64_t in_flight = 1;         // waves of a stage of pp whose backward has not run, at most (program.h)
  std::int64_t cp = 1;                // ranks that divide the rows of trunks and have waves dealt to them
  std::int64_t temperatures = 1;      // most outputs of one row
};

inline constexpr StepKind kForwardOnly{.gradients = false, .optimizer = false};

// True where a token's derivative depends on other tokens of its rollout: by the policy loss, or because sequence
// importance weights hold the current log-probs, where a rollout has no old ones.
bool needs_whole_rollout(const Options& options, std::span<const Rollout> rollouts);

// How many temperatures the rollouts have; of a critic 1.
std::int64_t temperatures_of(const ModelShape& shape, std::span<const Rollout> rollouts);

// The kind of a gradient on these rollouts. A critic (`shape` with a value head) has neither policy nor router losses.
// `counted`: the routers' choices at these weights are known, so that no counting pass is needed.
StepKind step_kind_of(const Options& options, const ModelShape& shape, std::span<const Rollout> rollouts,
                      bool counted = false);

}  // namespace espalier
