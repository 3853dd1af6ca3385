// The kind of a step, from options, model and rollouts: what it computes beyond its rows, what its process holds, and
// how its device works. The rank's position is in LocalShape.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/options/options.h"
#include "espalier/rollout/rollout.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// The work of a step.
struct StepKind {
  bool gradients = true;         // false: forward only
  bool whole_rollout = false;    // the objective's derivative needs whole rollouts: the head runs again in the backward
  bool all_rows_choose = false;  // router losses or whole loads: a last layer of experts runs all rows
  bool sequence_pass = false;    // a forward pass for values of sequences of several records comes first
  bool counting_pass = false;    // a forward pass for the routers' choices comes first
  bool counts_rollouts = false;  // router losses per rollout: ranks of cp sum the choices of a sharded rollout
  std::int64_t temperatures = 1;                    // the largest number of outputs of one row
  std::int64_t kept_ids = 0, largest_kept_set = 0;  // ids of all kept sets, and of the largest
};

inline constexpr StepKind kForwardOnly{.gradients = false};

// The state that a process holds for a model in its steps, besides the weights.
struct HeldState {
  bool gradients = true;              // accumulators of the trained parameters
  bool optimizer = true;              // moments, and masters in bfloat16
  std::int64_t optimizer_shares = 1;  // ranks over which the optimizer state is sharded
  std::int64_t beside_bytes = 0;      // held by other models
};

inline constexpr HeldState kWeightsOnly{.gradients = false, .optimizer = false};

struct DeviceTraits {
  bool cuda = false;         // a GPU: its context and libraries count, and not the process
  bool opened = false;       // by this process: its context is not in the memory that was free
  bool queued = false;       // its work is queued: the head computes a block of logits ahead
  bool writes_sums = false;  // its products write sums (ops/products.h)
  AttentionKernels attention = AttentionKernels::own;  // of a GPU, in bfloat16
  bool deterministic = true;                           // a library's kernels sum in one order
  bool adds_in_turn = false;  // and keep no number for each pair of rows (attention/operations.h)
};

// The traits of a device type; the device need not be present.
DeviceTraits traits_of(DeviceType device);

struct StepSetting {
  HeldState held;
  DeviceTraits device;
};

// True if a token's derivative depends on other tokens of its sequence: because of the policy loss, a ratio for each
// sequence (--ratio-level), an off-policy threshold, or because sequence importance weights use the current log-probs
// of rollouts without old ones.
bool needs_whole_rollout(const Options& options, std::span<const Rollout> rollouts);
// True if, besides, a sequence has several rollouts with loss tokens (--loss-unit trajectory). A forward pass then
// gives the values of sequences, and a token's derivative depends on no other token.
bool needs_sequence_pass(const Options& options, std::span<const Rollout> rollouts);

// The kind of a gradient on these rollouts. A critic (`shape` with a value head) has neither policy nor router losses.
// `counted`: the routers' choices at these weights are known, so that no counting pass is needed.
StepKind step_kind_of(const Options& options, const ModelShape& shape, std::span<const Rollout> rollouts,
                      bool counted = false);
// The kind of a pass without gradients.
StepKind forward_kind_of(const ModelShape& shape, std::span<const Rollout> rollouts);

}  // namespace espalier
