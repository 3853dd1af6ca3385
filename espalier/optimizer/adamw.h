// AdamW over flat buffers, with float32 masters (float64 in float64 runs), warm-up and global-norm clipping.
//
// One update: the gradient's global norm decides the clipping factor, the factor enters the moments, the moments move
// the masters, the masters are rounded into the weights. In float32 and float64 the masters are the weights.
//
// With --shard optimizer each rank keeps masters and moments of a contiguous range of elements, updates these weights
// and sends them to the others (ZeRO-1). With --shard full each rank updates its own part of the weights (ZeRO-3). The
// norm is that of the whole model's gradient on every rank; a part that several ranks hold counts once
// (Shard::counted).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "espalier/device/device.h"
#include "espalier/model/parameters.h"
#include "espalier/options/options.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

struct AdamWSettings {
  double lr = 1e-6, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  bool decay_matrices_only = false;
  double max_grad_norm = 1.0;  // 0: no clipping
  std::int64_t warmup_steps = 0;
  LrSchedule schedule = LrSchedule::constant;
  double min_lr_ratio = 0;
  std::int64_t total_steps = 0;  // of the schedule; 0: unknown

  static AdamWSettings from(const Options& options);
};

// The factor that limits a gradient of this norm to `max_norm`: min(1, max_norm / (norm + 1e-6)); 1 if max_norm is 0.
// Source: torch.nn.utils.clip_grad_norm_.
double clip_factor(double norm, double max_norm);

// Learning rate of step t = 1, 2, ... of T = total_steps, which all schedules but constant need, with w = warmup_steps,
// s = t - 1 and r = min_lr_ratio:
//   s < w: lr s / w.   Later lr (r + (1 - r) f) with x = (s - w) / max(1, T - w) and
//   f = 1 (constant), max(0, 1 - x) (linear), (1 + cos(pi min(1, x))) / 2 (cosine).
// Source: the schedules of transformers and verl, whose first step of a warm-up has rate 0; mathematics section 17.
double learning_rate(const AdamWSettings& settings, std::int64_t step);

// The ranks of an optimizer.
struct OptimizerRanks {
  Group& shares = mesh_of_one().dp;    // with --shard optimizer: each keeps a part of the state
  Group& world = mesh_of_one().world;  // together these ranks have the whole gradient
};
OptimizerRanks optimizer_ranks(const Options& options, const Mesh& mesh);

class AdamW {
 public:
  // `weights`: the model's flat buffer on the device, which step() overwrites. Table and ranks must outlive the object.
  AdamW(const ParameterTable& table, const at::Tensor& weights, const AdamWSettings& settings,
        Device& device = bound_device(), const OptimizerRanks& ranks = {});

  struct Update {
    double grad_norm = 0, clip_factor = 1, lr = 0;
    double seconds = 0;  // set by the caller of step()
  };
  // One update from `gradient`, in the table's layout and equal on all ranks that hold the same parameters. Every rank
  // of the world calls it. Errors: InputError, on all ranks, if the norm is not finite; nothing has changed then.
  Update step(const at::Tensor& gradient) { return step(gradient, settings_); }
  // The same with settings of its own, for callers whose settings change from step to step. `between`, if there is one,
  // is called before each piece of the elements.
  Update step(const at::Tensor& gradient, const AdamWSettings& settings, const std::function<void()>& between = {});

  std::int64_t steps_done() const { return steps_done_; }
  void set_steps_done(std::int64_t steps) { steps_done_ = steps; }
  // Sets the last step of the run, for a schedule without --lr-total-steps.
  void set_last_step(std::int64_t step) {
    if (settings_.total_steps == 0) settings_.total_steps = step;
  }
  // Elements [own().begin, own().end) of the flat buffers of weights, accumulator dtype. masters() is the weights' own
  // buffer unless they are bfloat16.
  const at::Tensor& masters() const { return masters_; }
  const at::Tensor& exp_avg() const { return exp_avg_; }
  const at::Tensor& exp_avg_sq() const { return exp_avg_sq_; }

  // Rounds the masters into the weights and sends them to all ranks of shares(), each of which calls it. Needed after
  // other code has written the masters.
  void masters_changed();

  struct Range {
    std::int64_t begin = 0, end = 0;
  };
  // The range of optimizer state owned by `rank` when `ranks` ranks shard `elements` elements.
  static Range range_of(std::int64_t elements, int ranks, int rank);
  Range range_of(int rank) const { return range_of(table_.kept_size(), ranks_.shares.size(), rank); }
  Range own() const { return range_of(ranks_.shares.rank()); }
  Group& shares() const { return ranks_.shares; }

 private:
  void share_weights();  // sends this rank's part to the others
  double norm_of(const at::Tensor& gradient) const;
  static bool decays(const Parameter& parameter, const AdamWSettings& settings);

  const ParameterTable& table_;
  AdamWSettings settings_;
  Device& device_;
  OptimizerRanks ranks_;
  at::Tensor weights_, masters_, exp_avg_, exp_avg_sq_;
  std::int64_t steps_done_ = 0;
};

}  // namespace espalier
