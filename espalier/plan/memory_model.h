// Bytes of a step by phase, from the shape alone: what the decoder takes from its arena, and what is always held.
//
// Every number of bytes the planner uses comes from ActivationBytes; the walk over a plan (PeakWalk) adds them up with
// the stack discipline of the schedule. Each tensor is rounded up to 64 bytes. b: bytes of the run's dtype; a: of its
// accumulator (4; 8 in float64 runs).
// T rows, O output rows, P path rows, H query heads, J key/value heads, D head size, M width, F inner width, L layers.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/plan/flops.h"
#include "espalier/plan/model_shape.h"
#include "espalier/plan/step_plan.h"

namespace espalier {

// K and V of one prefix token over all layers: 2 L J D b (mathematics, section 10).
std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype);

class ActivationBytes {
 public:
  ActivationBytes(const ModelShape& shape, DType dtype);

  // Held through the step: weights, gradients, masters (bfloat16 only), two moments, and the process itself.
  std::int64_t constant() const;
  // K, V and their accumulators for every layer, allocated once for the longest path.
  std::int64_t path(std::int64_t path_rows) const;

  // What a forward leaves for the backward: all layers and the final norm. `keep` false: the layers' inputs alone.
  std::int64_t saved(std::int64_t rows, std::int64_t outputs, bool keep) const;
  // The part of it that belongs to one layer.
  std::int64_t saved_full_layer(std::int64_t rows, std::int64_t layer) const;
  std::int64_t saved_last_layer(std::int64_t rows, std::int64_t outputs) const;

  // Most that lives besides the saved state while a layer runs.
  std::int64_t forward_scratch(std::int64_t rows) const;
  std::int64_t backward_scratch(std::int64_t rows, bool wave) const;
  std::int64_t last_backward_scratch(std::int64_t rows, std::int64_t outputs, bool wave) const;
  std::int64_t head_scratch(std::int64_t outputs) const;

  std::int64_t layers() const { return shape_.layers; }

 private:
  std::int64_t tensor(std::int64_t rows, std::int64_t width, std::int64_t size) const {
    return (rows * width * size + 63) / 64 * 64;
  }
  std::int64_t inner(std::int64_t layer) const;  // F, or k x expert inner width
  std::int64_t widest_inner() const;
  std::int64_t saved_outputs(std::int64_t outputs) const;  // final stream, normed, rstd

  ModelShape shape_;
  std::int64_t b_, a_;
  std::int64_t full_inner_sum_ = 0;  // over the full layers
};

// Peaks of the phases of one item and everything below it, when `held` bytes of enclosing state are open. Constant and
// path bytes are not in it: they belong to the step.
class PeakWalk {
 public:
  explicit PeakWalk(const ActivationBytes& bytes) : bytes_(bytes) {}

  void wave(const Work& work, std::int64_t held);
  // Returns what is held while the items below run.
  std::int64_t open_trunk(const Work& work, bool keep, std::int64_t held);
  void close_trunk(const Work& work, bool keep, std::int64_t held);

  // Peaks with `base` bytes held throughout; phases that never ran stay 0.
  PhasePeaks peaks(std::int64_t base) const;

 private:
  std::int64_t forward_peak(const Work& work, std::int64_t saved) const;
  std::int64_t backward_peak(const Work& work, bool wave) const;

  const ActivationBytes& bytes_;
  std::int64_t a_ = -1, b_ = -1, c_ = -1;
};

}  // namespace espalier
