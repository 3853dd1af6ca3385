// Bytes of a step by phase, from the shape alone: the arena's buffers, and the bytes that are always held.
//
// Every number of bytes in the planner comes from ActivationBytes. Bytes of the arena come from the declarations that
// the engine itself uses (model/block_buffers.h and others of this kind). This file adds the order of layers, and
// PeakWalk the order of items: the stack discipline of model/decoder_pass.cpp and of the schedule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/forecast/flops.h"
#include "espalier/model/block_buffers.h"
#include "espalier/objective/head_buffers.h"
#include "espalier/program/program.h"
#include "espalier/program/shared_runs.h"
#include "espalier/program/step_plan.h"
#include "espalier/saved/spill_buffers.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

// The path's bytes in a step: during a forward, during a backward, and in the store. A path that is not offloaded holds
// the same bytes throughout.
struct PathBytes {
  std::int64_t forward = 0, backward = 0, stored = 0;
  bool sleeps = false;  // some layer does
};

// For one rank's layers. Besides those always in memory, one layer is in memory at a time. Offloaded path: a forward
// holds it without accumulators. Path sharded over cp: it is held with its accumulators, beside this rank's part of all
// such layers and the rooms for one gathered layer and one layer's reduced gradients. A path of latents has besides the
// room of the layer in use throughout.
PathBytes path_bytes(const BufferSizes& sizes, PathRows rows, bool with_gradients, const PathPlan& path,
                     std::int64_t cp);
// An item's work for its path: bytes moved between the path's store and memory, both ways counted; and FLOPs of the
// products that expand latents to keys and values and take their gradients back.
struct PathTraffic {
  std::int64_t forward = 0, backward = 0;
  double flops = 0;
};

// Bytes of activations. Not thread-safe: it caches items and traffic, because a planner asks for an item many times:
// for peaks, for seconds and for every other plan with the same item.
class ActivationBytes {
 public:
  // For one rank: its parameters, heads and columns of inner width.
  ActivationBytes(const LocalShape& local, DType dtype, const StepKind& kind = {}, const StepSetting& setting = {});

  // Weights; gradients, masters (bfloat16 only) and two moments if they are held. For sharded weights: this rank's
  // part, and the rooms in which units are gathered.
  std::int64_t model() const;
  // Held throughout the step: the model, the process itself and the bytes of other models.
  std::int64_t constant() const;
  // Bytes outside the arena, for sets of at most `rows` rows below `path_rows` rows: buffers of the matrix library and
  // of attention (measured; one per thread, bounded for every shape), kernels that the matrix library compiles for
  // bfloat16, and the description of an item's rows.
  std::int64_t scratch(std::int64_t rows, std::int64_t path_rows = 0, int threads = 1) const;
  // K and V, or latents, for every layer, with their accumulators if there are gradients; allocated once for the
  // longest path.
  PathBytes path(PathRows rows, const PathPlan& path = {}) const {
    return path_bytes(sizes(), rows, kind_.gradients, path, cp_);
  }
  // For an item below `rows_above` path rows; `own_rows`: a trunk's rows, 0 for a wave. The forward reads K and V (or
  // latents) and writes a trunk's own; the backward reads all of them and writes the accumulators. From latents: the
  // forward expands the rows above (again if it is run again), the backward all of them.
  PathTraffic path_traffic(std::int64_t rows_above, std::int64_t own_rows, const PathPlan& path) const {
    if (traffic_.rows_above != rows_above || traffic_.own_rows != own_rows || traffic_.path != path)
      traffic_ = {rows_above, own_rows, path, path_traffic_of(rows_above, own_rows, path)};
    return traffic_.traffic;
  }

  // Bytes that an item holds between its forward and its backward: the kept state of its layers, and a trunk's
  // recurrent states.
  std::int64_t saved(const Work& work, ItemState state, bool wave = false) const {
    return item(work, state, wave).saved;
  }
  // Bytes that it has in the store in the meantime.
  std::int64_t stored(const Work& work, ItemState state) const { return item(work, state, false).stored; }
  // Device bytes in flight for this many bytes in the store; 0 on a GPU, whose store is in host memory.
  std::int64_t in_flight(std::int64_t stored_bytes) const;
  // Peak bytes of an item, saved state included: during its forward and the head, and during its backward. `wave`: its
  // keys, values and their gradients are its own; a trunk's are in the path.
  std::int64_t forward_peak(const Work& work, ItemState state, bool wave) const {
    return item(work, state, wave).forward_peak;
  }
  std::int64_t backward_peak(const Work& work, ItemState state, bool wave) const {
    return item(work, state, wave).backward_peak;
  }

  // Rows of the head's block of logits for this many outputs.
  std::int64_t head_block_rows(std::int64_t outputs) const;

  // A trunk's rows on the rank of cp with the most; they may include all of its outputs.
  Work share_of(const Work& trunk) const;

  bool gradients() const { return kind_.gradients; }
  std::int64_t waves_in_flight() const { return kind_.gradients ? in_flight_ : 1; }
  // Peak bytes of a wave while similar waves are in flight.
  std::int64_t wave_peak(const Work& work, ItemState state) const;
  std::int64_t layers() const { return shape_.layers(); }
  std::int64_t window() const { return window_; }
  const ModelShape& shape() const { return shape_; }

 private:
  // The bytes of one item. They depend only on rows, outputs, state and kind.
  struct Item {
    std::int64_t rows = -1, outputs = 0, forks = 0;
    ItemState state;
    bool wave = false;
    std::int64_t saved = 0, stored = 0, forward_peak = 0, backward_peak = 0;
  };
  const Item& item(const Work& work, ItemState state, bool wave) const;
  // The traffic that was asked for last: a planner weighs one item in all of its states.
  struct Traffic {
    std::int64_t rows_above = -1, own_rows = 0;
    PathPlan path;
    PathTraffic traffic;
  };
  PathTraffic path_traffic_of(std::int64_t rows_above, std::int64_t own_rows, const PathPlan& path) const;
  // The recurrent states that a trunk leaves for everything below it.
  std::int64_t states(bool wave) const { return wave ? 0 : StateBuffers(sizes(), kind_.gradients).peak(); }
  std::int64_t saved_of(const Work& work, ItemState state, bool wave) const;
  std::int64_t stored_of(const Work& work, ItemState state) const;
  std::int64_t forward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t saved) const;
  std::int64_t backward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t saved) const;

  // Layers in which all rows continue hold the same bytes if they are of one kind: alike in mixer, MLP and norms. The
  // peak is in the last layer of a kind, when this many layers of each kind are saved, itself included. Layers without
  // a backward save nothing.
  struct FullKind {
    std::size_t kind;                   // in kinds_
    bool has_backward;                  // of some layer of the kind
    std::vector<std::int64_t> of_kind;  // saved layers by kind

    std::int64_t layers() const { return std::accumulate(of_kind.begin(), of_kind.end(), std::int64_t{0}); }
  };
  std::size_t kind_of(const LayerShape& layer);  // adds it to kinds_ where it is the first

  BufferSizes sizes() const { return {shape_, element_bytes(dtype_), rounds_weight_gradients_}; }
  BlockShape block(const LayerShape& layer) const { return {sizes(), layer}; }
  std::int64_t stream(std::int64_t rows) const { return StreamBuffer(sizes(), rows).peak(); }
  BlockRows full(const Work& work, bool wave, const LayerShape& layer) const {
    BlockRows rows{.all = work.rows, .continuing = work.rows};
    rows.in_path = layer.is_read_later || (!wave && cp_ == 1 && layer.mixer->window() == 0);
    rows.ranks = wave ? 1 : cp_;
    rows.states = work.forks + shared_states(cp_);
    return rows;
  }
  BlockRows narrow(const Work& work, bool wave) const {
    BlockRows rows = full(work, wave, shape_.layer.back());
    rows.continuing = work.outputs, rows.narrow = true;
    return rows;
  }
  std::int64_t forward_only() const { return shape_.trained.first_layer; }  // layers without a backward
  std::int64_t saved_layers() const { return shape_.layers() - forward_only(); }
  // The number of saved streams: inputs of layers and of the final norm.
  std::int64_t streams() const { return saved_layers() == 0 ? 0 : saved_layers() + (last_is_narrow_ ? 0 : 1); }
  // Bytes of one layer's members in one place, without its input; of the members counted in `upto`.
  std::int64_t members(const LayerShape& layer, const BlockRows& rows, ItemState state, ItemState::Member place) const;
  std::int64_t members(const LayerShape& layer, const BlockRows& rows) const;
  std::int64_t saved_members(const Work& work, ItemState state, bool wave, ItemState::Member place) const;
  std::int64_t full_members(const Work& work, const FullKind& upto, ItemState state, bool wave,
                            ItemState::Member place) const;
  std::int64_t layer_forward(const LayerShape& layer, const BlockRows& rows, bool with_output) const {
    return layer_forward_bytes(block(layer), rows, with_output);
  }
  std::int64_t outputs_held(const Work& work) const {
    return has_outputs_ ? ItemBuffers(sizes(), work.outputs, kind_.gradients).peak() : 0;
  }
  // Rows that later layers read, and inputs of layers; or their gradients in a backward.
  std::int64_t read_later(const Work& work, bool wave, bool gradients) const;
  // Visits every kind of layer that exists, and the last layer.
  void for_each_layer_kind(const Work& work, bool wave, auto&& visit) const;
  std::int64_t number_bytes(std::int64_t rows, std::int64_t path_rows) const;
  std::int64_t head(const Work& work, bool with_gradient) const;
  HeadBuffers head_buffers(std::int64_t outputs, bool with_gradient) const;

  ModelShape shape_;
  std::int64_t trained_, held_, narrow_;  // parameters kept by this rank; the held ones include the rooms
  std::int64_t quantised_;                // bytes
  std::int64_t rooms_ = 0,
               sums_ = 0;  // elements of rooms, and of sums of units, if weights are sharded
  StepKind kind_;
  StepSetting setting_;
  std::int64_t cp_, communicator_bytes_, in_flight_, window_;
  DType dtype_;
  bool has_outputs_;              // the last stage of pp
  bool widens_products_;          // bfloat16 products use float32 panels on this machine
  bool rounds_weight_gradients_;  // the matrix library multiplies bfloat16 with kernels that it compiles
  bool last_is_narrow_ = true;
  std::vector<LayerShape> kinds_;
  std::vector<FullKind> full_kinds_;  // the kind of the last such layer is at the end
  // By a hash of what an item's bytes depend on; an item takes the place of another one with the same hash. Few places
  // until there are more items than that.
  static constexpr std::size_t kFewItems = 64, kManyItems = std::size_t{1} << 15;
  mutable std::vector<Item> asked_;
  mutable std::size_t misses_ = 0;
  mutable Traffic traffic_;
};

inline Work work_of(const PlanItem& item) {
  return {item.set.rows,         item.set.pairs,        item.set.outputs,
          item.set.output_pairs, item.set.window_pairs, item.set.window_output_pairs,
          item.set.forks};
}

// Peak bytes of a rank program by phase, without constant and path bytes, which belong to the step.
class PeakWalk {
 public:
  explicit PeakWalk(const ActivationBytes& bytes) : bytes_(bytes) {}

  // Item: PlanItem or Draft. Joined steps hold nothing.
  template <class Item>
  void run(const ProgramOf<Item>& program) {
    for (const StepOf<Item>& step : program)
      if (step.own != nullptr) take(step.pass, step.kind, work_of(*step.own), step.own->state);
  }
  // `work`: of the whole item; the byte model derives a rank's part of a sharded trunk.
  void take(Pass pass, ItemKind kind, const Work& work, ItemState state);

  // Peaks with `base` bytes and the path held throughout; phases that never ran stay 0.
  PhasePeaks peaks(std::int64_t base, const PathBytes& path = {}) const;
  // The most bytes offloaded at a time.
  std::int64_t stored() const { return most_stored_; }

 private:
  const ActivationBytes& bytes_;
  std::int64_t a_ = -1, b_forward_ = -1, b_backward_ = -1, c_ = -1;
  std::int64_t held_ = 0;  // bytes of open trunks and of waves in flight
  std::int64_t stored_ = 0, most_stored_ = 0;
};

}  // namespace espalier
