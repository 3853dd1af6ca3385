// Bytes of a step by phase, from the shape alone: what the decoder takes from its arena, and what is always held.
//
// Every number of bytes the planner uses comes from ActivationBytes, and those of the arena from the declarations that
// the engine takes from it (forecast/block_buffers.h). This file adds the order of layers, and in PeakWalk that of
// items: the stack discipline of model/decoder.cpp and of the schedule.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "espalier/base/dtype.h"
#include "espalier/forecast/block_buffers.h"
#include "espalier/forecast/flops.h"
#include "espalier/program/program.h"
#include "espalier/program/step_plan.h"
#include "espalier/shape/local_shape.h"

namespace espalier {

// Data in flight to or from the store at a time (saved/spill_queue.h): so many chunks of so many bytes.
inline constexpr std::int64_t kSpillChunkBytes = std::int64_t{1} << 20;
inline constexpr std::int64_t kFewestSpillChunks = 2, kMostSpillChunks = 64;

// An eighth of what is stored away, within bounds.
std::int64_t chunks_in_flight(std::int64_t stored_bytes);

// The path's part of what a step holds: while a forward runs, while a backward runs, and in the store. A path that is
// not stored away holds the same throughout.
struct PathBytes {
  std::int64_t forward = 0, backward = 0, stored = 0;
  bool sleeps = false;  // some layer does
};

// For one rank's layers. Behind those that are always awake one is in memory: in the store's place in a forward without
// its accumulators; of a divided path with them, beside what this rank of cp keeps of all such layers, and rooms for
// one that is gathered and for the gradients of one that are summed.
PathBytes path_bytes(const BlockShape& block, std::int64_t path_rows, bool with_gradients, const PathPlan& path,
                     std::int64_t cp);

// Bytes that an item moves between the path's store and memory, each way counted, forward and backward.
struct PathTraffic {
  std::int64_t forward = 0, backward = 0;
};

// K and V of one prefix token over all layers: 2 L J D b (mathematics, section 10).
std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype);

// One of them serves one thread: it remembers the last items that it was asked for, since most of a chain are alike.
class ActivationBytes {
 public:
  // For one rank: its parameters, heads and inner columns.
  ActivationBytes(const LocalShape& local, DType dtype, const StepKind& kind = {}, const StepSetting& setting = {});

  // Weights; gradients, masters (bfloat16 only) and two moments where they are held. For those that ranks
  // divide what this rank keeps, and the rooms where units are brought together.
  std::int64_t model() const;
  // Held through the step: the model, the process itself and what is beside them.
  std::int64_t constant() const;
  // Outside the arena, for sets of at most so many rows under so many of trunks: buffers of the matrix library and of
  // attention (measured; every thread has its own, bounded whatever the shape), kernels that the matrix library
  // compiles for bfloat16, and the numbers that say what an item's rows are.
  std::int64_t scratch(std::int64_t rows, std::int64_t path_rows = 0, int threads = 1) const;
  // K and V for every layer, with their accumulators where there are gradients; allocated once for the longest path.
  PathBytes path(std::int64_t path_rows, const PathPlan& path = {}) const {
    return path_bytes(block(), path_rows, kind_.gradients, path, cp_);
  }
  // For an item below `rows_above` path rows; `own_rows` are a trunk's, 0 of a wave. Forward K and V come and a trunk's
  // own go; backwards all come and the accumulators go.
  PathTraffic path_traffic(std::int64_t rows_above, std::int64_t own_rows, const PathPlan& path) const;

  // Bytes that an item holds between its forward and its backward: the kept state of its layers, and what a trunk
  // leaves besides keys and values.
  std::int64_t saved(const Work& work, ItemState state, bool wave = false) const {
    return item(work, state, wave).saved;
  }
  // Bytes that it has in the store meanwhile.
  std::int64_t stored(const Work& work, ItemState state) const { return item(work, state, false).stored; }
  // Device bytes in flight for so many bytes in the store. A GPU's store lies in the host's memory.
  std::int64_t in_flight(std::int64_t stored_bytes) const;
  // Most that an item takes, its saved state included: while its forward and the head run, and while its backward runs.
  // `wave`: its keys, values and their gradients are its own; a trunk's are in the path.
  std::int64_t forward_peak(const Work& work, ItemState state, bool wave) const {
    return item(work, state, wave).forward_peak;
  }
  std::int64_t backward_peak(const Work& work, ItemState state, bool wave) const {
    return item(work, state, wave).backward_peak;
  }

  // Rows of the head's block of logits, of so many outputs.
  std::int64_t head_block_rows(std::int64_t outputs) const;

  // A trunk's rows on the rank of cp with most of them; its outputs may all be among them.
  Work share_of(const Work& trunk) const;

  bool gradients() const { return kind_.gradients; }
  std::int64_t waves_in_flight() const { return kind_.gradients ? in_flight_ : 1; }
  // Most that a wave takes while others like it are in flight.
  std::int64_t wave_peak(const Work& work, ItemState state) const;
  std::int64_t layers() const { return shape_.layers; }

 private:
  // Bytes that one item holds; they depend on rows, outputs, state and kind alone.
  struct Item {
    std::int64_t rows = -1, outputs = 0, forks = 0;
    ItemState state;
    bool wave = false;
    std::int64_t saved = 0, stored = 0, forward_peak = 0, backward_peak = 0;
  };
  const Item& item(const Work& work, ItemState state, bool wave) const;
  // What a trunk leaves for everything below it in layers whose rows carry a state.
  std::int64_t states(bool wave) const { return wave ? 0 : StateBuffers(block(), kind_.gradients).peak(); }
  std::int64_t saved_of(const Work& work, ItemState state) const;
  std::int64_t stored_of(const Work& work, ItemState state) const;
  std::int64_t forward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t saved) const;
  std::int64_t backward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t saved) const;

  // Layers in which all rows continue hold the same bytes if their MLPs are of one kind. The most is held in the last
  // of a kind, when so many layers of both kinds are saved, itself included. Layers without a backward save nothing.
  struct FullKind {
    bool experts;
    Mixer mixer;
    bool has_backward;                    // some layer of the kind does
    std::array<std::int64_t, 4> of_kind;  // layers by kind: experts, and two more for a state

    std::int64_t layers() const { return of_kind[0] + of_kind[1] + of_kind[2] + of_kind[3]; }
  };

  BlockShape block() const { return {shape_, element_bytes(dtype_), rounds_weight_gradients_}; }
  std::int64_t stream(std::int64_t rows) const { return StreamBuffer(block(), rows).peak(); }
  BlockRows full(const Work& work, bool wave, bool experts, Mixer mixer) const {
    return {work.rows, work.rows, false, !wave && cp_ == 1, experts, wave ? 1 : cp_, mixer, work.forks};
  }
  BlockRows narrow(const Work& work, bool wave) const {
    return {work.rows,         work.outputs,   true,        !wave && cp_ == 1,
            last_has_experts_, wave ? 1 : cp_, last_mixer_, work.forks};
  }
  std::int64_t forward_only() const { return shape_.trained.first_layer; }  // layers without a backward
  std::int64_t saved_layers() const { return shape_.layers - forward_only(); }
  // Saved inputs of layers and of the end.
  std::int64_t streams() const { return saved_layers() == 0 ? 0 : saved_layers() + (last_is_narrow_ ? 0 : 1); }
  // The members of one layer that are in one of the places, its input excluded; of all that are in `upto`.
  std::int64_t members(const BlockRows& rows, ItemState state, ItemState::Member place) const;
  std::int64_t members(const BlockRows& rows) const;
  std::int64_t saved_members(const Work& work, ItemState state, ItemState::Member place) const;
  std::int64_t full_members(const Work& work, const FullKind& upto, ItemState state, ItemState::Member place) const;
  std::int64_t layer_forward(const BlockRows& rows, bool with_output) const {
    return layer_forward_bytes(block(), rows, with_output);
  }
  std::int64_t outputs_held(const Work& work) const {
    return has_outputs_ ? ItemBuffers(block(), work.outputs, kind_.gradients).peak() : 0;
  }
  // Calls with every kind of layer that there is, the last one included.
  void for_each_layer_kind(const Work& work, bool wave, auto&& visit) const;
  std::int64_t number_bytes(std::int64_t rows, std::int64_t path_rows) const;
  std::int64_t head(const Work& work, bool with_gradient) const;
  HeadBuffers head_buffers(std::int64_t outputs, bool with_gradient) const;

  ModelShape shape_;
  std::int64_t trained_, held_, narrow_;  // parameters that this rank keeps; of those held with the rooms
  std::int64_t rooms_ = 0,
               sums_ = 0;  // elements of rooms, and of sums of units, where weights are divided
  StepKind kind_;
  StepSetting setting_;
  std::int64_t cp_, in_flight_;
  DType dtype_;
  bool has_outputs_;              // the last stage of pp
  bool widens_products_;          // bfloat16 products are made of float32 panels here
  bool rounds_weight_gradients_;  // the matrix library multiplies bfloat16, with kernels that it compiles
  bool last_has_experts_ = false, last_is_narrow_ = true;
  Mixer last_mixer_ = Mixer::attention;
  std::vector<FullKind> full_kinds_;  // at most four, the one of the last such layer at the end
  mutable std::array<Item, 8> asked_;
  mutable std::size_t next_asked_ = 0;
};

inline Work work_of(const PlanItem& item) {
  return {item.set.rows,         item.set.pairs,        item.set.outputs,
          item.set.output_pairs, item.set.window_pairs, item.set.window_output_pairs,
          item.set.forks};
}

// Peaks of the phases of programs. Constant and path bytes are not in it: they belong to the step.
class PeakWalk {
 public:
  explicit PeakWalk(const ActivationBytes& bytes) : bytes_(bytes) {}

  // Item: PlanItem or Draft. Steps that are joined hold nothing.
  template <class Item>
  void run(const ProgramOf<Item>& program) {
    for (const StepOf<Item>& step : program)
      if (step.own != nullptr) take(step.pass, step.kind, work_of(*step.own), step.own->state);
  }
  // `work`: of the whole item; what a rank has of a divided trunk is the byte model's to say.
  void take(Pass pass, ItemKind kind, const Work& work, ItemState state);

  // Peaks with `base` bytes and the path held throughout; phases that never ran stay 0.
  PhasePeaks peaks(std::int64_t base, const PathBytes& path = {}) const;
  // The most that is stored away at a time.
  std::int64_t stored() const { return most_stored_; }

 private:
  const ActivationBytes& bytes_;
  std::int64_t a_ = -1, b_forward_ = -1, b_backward_ = -1, c_ = -1;
  std::int64_t held_ = 0;  // of open trunks and of waves in flight
  std::int64_t stored_ = 0, most_stored_ = 0;
};

}  // namespace espalier
