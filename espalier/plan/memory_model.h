// Bytes of a step by phase, from the shape alone: what the decoder takes from its arena, and what is always held.
//
// Every number of bytes the planner uses comes from ActivationBytes; the walk over a plan (PeakWalk) adds them up with
// the stack discipline of the schedule. Each tensor is rounded up to 64 bytes, as the arena does. b: bytes of the run's
// dtype; a: of its accumulator (4; 8 in float64 runs). T rows, O output rows, P path rows, H query heads, J key/value
// heads, D head size, M width, F inner width (of one expert in expert layers), E experts, k of them a row, L layers.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/plan/flops.h"
#include "espalier/plan/model_shape.h"
#include "espalier/plan/step_plan.h"

namespace espalier {

// K and V of one prefix token over all layers: 2 L J D b (mathematics, section 10).
std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype);

// Follows the takes and releases of model/decoder.cpp, model/layer.cpp, model/kv_path.cpp, objective/fused_head.cpp and
// phase/item_run.cpp in their order. A change of what those take from the arena is a change here; a test compares the
// two to the byte.
class ActivationBytes {
 public:
  ActivationBytes(const ModelShape& shape, DType dtype, const StepKind& kind = {});

  // Weights; gradients, masters (bfloat16 only) and two moments where the kind of step has them.
  std::int64_t model() const;
  // Held through the step: the model, the process itself and what is beside them.
  std::int64_t constant() const;
  // Buffers of the matrix library and of attention outside the arena, for sets of at most so many rows. Measured.
  // Bounded, whatever the shape: what grows with the rows is in the arena.
  std::int64_t scratch(std::int64_t rows) const;
  // K and V for every layer, with their accumulators where there are gradients; allocated once for the longest path.
  std::int64_t path(std::int64_t path_rows) const;

  // What an item holds between its forward and the end of its backward. `keep` false: of the layers their inputs alone.
  std::int64_t saved(const Work& work, bool keep) const;
  // Most that an item takes, its saved state included: while its forward and the head run, and while its backward runs.
  // `wave`: its keys, values and their gradients are its own; a trunk's are in the path.
  std::int64_t forward_peak(const Work& work, bool keep, bool wave) const;
  std::int64_t backward_peak(const Work& work, bool keep, bool wave) const;

  bool gradients() const { return kind_.gradients; }

 private:
  // Rows of one layer: all of them, and those that continue past keys and values.
  struct LayerRows {
    std::int64_t all, continuing;
    bool narrow;  // only output rows continue
    bool experts;
  };
  // Layers in which all rows continue hold the same bytes if their MLPs are of one kind. The most is held in the last
  // of a kind, when so many layers of both kinds are saved, itself included.
  struct FullKind {
    bool experts;
    std::int64_t dense_layers, expert_layers;

    std::int64_t layers() const { return dense_layers + expert_layers; }
  };

  std::int64_t tensor(std::int64_t rows, std::int64_t width, std::int64_t size) const {
    return (rows * width * size + 63) / 64 * 64;
  }
  std::int64_t stream(std::int64_t rows) const { return tensor(rows, shape_.hidden, b_); }
  LayerRows full(const Work& work, bool experts) const { return {work.rows, work.rows, false, experts}; }
  LayerRows narrow(const Work& work) const { return {work.rows, work.outputs, true, last_has_experts_}; }
  std::int64_t streams() const { return shape_.layers + (last_is_narrow_ ? 0 : 1); }  // inputs of layers and of the end
  std::int64_t full_saved(const Work& work, const FullKind& upto) const;
  std::int64_t mlp_saved(const LayerRows& rows) const;
  std::int64_t mlp_forward(const LayerRows& rows, bool with_output) const;
  std::int64_t mlp_backward(const LayerRows& rows) const;
  std::int64_t layer_saved(const LayerRows& rows) const;  // without the layer's input
  std::int64_t layer_forward(const LayerRows& rows, bool wave, bool with_output) const;
  std::int64_t layer_backward(const LayerRows& rows, bool wave) const;
  std::int64_t rounded_product(std::int64_t outputs, std::int64_t inputs) const;
  std::int64_t head_outputs(std::int64_t outputs) const;
  std::int64_t head(std::int64_t outputs, bool with_gradient) const;

  ModelShape shape_;
  StepKind kind_;
  std::int64_t b_, a_;
  bool widens_;                      // bfloat16 products are made of float32 panels here
  std::int64_t q_width_, kv_width_;  // H D, J D
  bool last_has_experts_ = false, last_is_narrow_ = true;
  std::vector<FullKind> full_kinds_;  // at most two, the one of the last such layer at the end
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
  const ActivationBytes& bytes_;
  std::int64_t a_ = -1, b_ = -1, c_ = -1;
};

}  // namespace espalier
