// What a step computes beyond its rows, found from options, model and rollouts; what its process holds; and how its
// device works. Where a rank stands among others is LocalShape's.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// The work.
struct StepKind {
  bool gradients = true;         // false: forward only
  bool whole_rollout = false;    // the objective's derivative needs whole rollouts: the head runs again in the backward
  bool all_rows_choose = false;  // router losses or whole loads: a last layer of experts runs all rows
  bool counting_pass = false;    // a forward pass for the routers' choices comes first
  bool counts_rollouts = false;  // router losses by rollout: ranks that divide one join its choices
  std::int64_t temperatures = 1;  // most outputs of one row
};

inline constexpr StepKind kForwardOnly{.gradients = false};

// What a process holds of a model while it runs steps with it, beside its weights.
struct HeldState {
  bool gradients = true;              // accumulators of what trains
  bool optimizer = true;              // moments, and masters in bfloat16
  std::int64_t optimizer_shares = 1;  // ranks that keep a share each of what `optimizer` stands for
  std::int64_t beside_bytes = 0;      // of other models
};

inline constexpr HeldState kWeightsOnly{.gradients = false, .optimizer = false};

struct DeviceTraits {
  bool cuda = false;         // a GPU: its context and libraries are held in place of the process
  bool queued = false;       // its work waits in queues: the head computes a block of logits ahead
  bool writes_sums = false;  // its products do (ops/products.h)
};

// Of a device that need not be there.
DeviceTraits traits_of(DeviceType device);

struct StepSetting {
  HeldState held;
  DeviceTraits device;
};

// True where a token's derivative depends on other tokens of its rollout: by the policy loss, or because sequence
// importance weights hold the current log-probs, where a rollout has no old ones.
bool needs_whole_rollout(const Options& options, std::span<const Rollout> rollouts);

// The kind of a gradient on these rollouts. A critic (`shape` with a value head) has neither policy nor router losses.
// `counted`: the routers' choices at these weights are known, so that no counting pass is needed.
StepKind step_kind_of(const Options& options, const ModelShape& shape, std::span<const Rollout> rollouts,
                      bool counted = false);
// Of a pass without gradients.
StepKind forward_kind_of(const ModelShape& shape, std::span<const Rollout> rollouts);

}  // namespace espalier
