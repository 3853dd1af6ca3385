// Rows and states that the layers of the open trunks leave for rows below them, trunks end to end, and the sums of
// their gradients from everything below.
//
// Shapes: P rows of the open trunks, W numbers of a row of one kind. A mixer says which kinds of rows its layer leaves
// (Mixer::path_kinds): keys and values, or latents; a recurrent layer leaves a state for each trunk instead. A stack: a
// trunk's rows are pushed when its forward begins and popped after its backward. Gradients are kept in float32 (float64
// in float64 runs), so that any number of waves adds up without loss (mathematics, section 2). Every trunk knows its
// planned number of contributions. Reading its gradient before the last contribution, or adding after it, is an error
// rather than a wrong number.
//
// A layer with a window may keep only what it shows to rows below: of each trunk its last rows (program/window_rows.h).
// Its rows are then counted apart, and it is always in memory.
//
// With latent attention all layers may be carried as latents, with the sums of their gradients. Keys and values, and
// their gradients, then exist for the layer in use: in one room for all layers, which is always in memory.
//
// Layers may read the rows of an earlier one (Mixer::source). The earlier layer is always in memory, and its gradient
// is complete when all of them, too, have added their contributions.
//
// Layers that are not in use may be offloaded or sharded, so a pass announces each layer before it reads or writes it.
// With a path sharded over cp (saved/sharded_path.h) all ranks of cp announce it together, even those without rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/model/block_buffers.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/path_window.h"
#include "espalier/program/window_rows.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

class OpenPath {
 public:
  using Layer = PathHeads;      // [P, J, D], [P, J, Dv]; gradients are undefined in forward-only passes
  using Latents = PathLatents;  // C channels after the norm [P, C] and K rotated channels [P, K]; gradients as above

  static constexpr std::int64_t kAllRows = -1;

  // Takes `capacity` rows for every layer from the arena; `window_capacity` for layers with a window, unless it is
  // kAllRows. With a keeper only the first `layers_awake` layers stay in memory while they are not in use; the keeper
  // must outlive the object. `latents`: carried as those, which the shape must allow (may_carry_latents).
  OpenPath(const ModelShape& shape, std::int64_t capacity, at::ScalarType dtype, bool with_gradients, Arena& arena,
           PathKeeper* keeper = nullptr, std::int64_t layers_awake = 0, std::int64_t window_capacity = kAllRows,
           bool latents = false);

  // A trunk's final state [N] in one recurrent layer, and the sum of its gradients. An undefined state is 0; an
  // undefined gradient is not needed.
  struct State {
    at::Tensor state_N, grad_state_N;
  };
  // The same for all recurrent layers, end to end (StateBuffers).
  struct States {
    at::Tensor states_N, grad_states_N;
  };

  std::int64_t rows() const { return rows_; }
  // Opens `rows` more rows for a trunk; `contributions` sets of rows below will add gradients. Zeroes gradients. The
  // caller owns the states and keeps them until the trunk is popped.
  void push(std::int64_t rows, std::int64_t contributions, const States& states = {});
  void pop();

  // Announces that a set of rows runs a layer: forward from the first to the last layer, or backward, with `rows_above`
  // visible rows of the path. The layer can be read and written until the next one begins or the backward ends.
  void begin_forward(std::int64_t layer);
  void begin_backward(std::int64_t layer, std::int64_t rows_above);
  void end_backward(std::int64_t layer);
  bool sleeps() const { return window_.has_value(); }

  bool carries_latents() const { return carries_latents_; }
  // The first `rows` rows, or the rows of the innermost trunk, as latents.
  Latents latents(std::int64_t layer, std::int64_t rows) const;
  Latents top_latents(std::int64_t layer) const;
  const LatentBlock& latent_block() const { return latent_block_; }
  // True if the room has the keys and values of the first `rows` rows of this layer; the second call says that it has.
  bool room_holds(std::int64_t layer, std::int64_t rows) const { return layer == room_layer_ && rows <= room_rows_; }
  void filled_room(std::int64_t layer, std::int64_t rows) { room_layer_ = layer, room_rows_ = rows; }

  // The rows that rows below the first `rows` rows see: all of these, or the last ones that a window may show, which
  // begin at depth first_row.
  Layer path(std::int64_t layer, std::int64_t rows) const;
  Layer top(std::int64_t layer) const;  // the rows of the innermost trunk, or its last ones
  // All kinds of rows that a layer without windows leaves, for a move from row to row: undefined rows are not left.
  std::vector<at::Tensor> rows_of(std::int64_t layer) const;
  // True if the layer keeps all rows of a trunk.
  bool keeps_all(std::int64_t layer) const { return window_of_[static_cast<std::size_t>(layer)] == 0; }
  // The depth of the first row that a layer with a window can show below `rows` rows; 0 where all layers keep all rows.
  std::int64_t first_row(std::int64_t rows) const { return first_window_row(rows, window_rows_); }

  // The part of all recurrent layers' states that is this layer's; undefined stays undefined.
  at::Tensor state_in(const at::Tensor& states_N, std::int64_t layer) const;
  // The state of the innermost trunk, or of the trunk that ends at path row `rows`.
  State state_of_top(std::int64_t layer) const { return state_of(layer, trunks_.size()); }
  State state_above(std::int64_t layer, std::int64_t rows) const;

  // Records that a set of rows below `rows` path rows has added its contribution to `layer`.
  void count_contribution(std::int64_t layer, std::int64_t rows);
  // Checks that `layer` is complete before the innermost trunk's backward reads it.
  void expect_complete(std::int64_t layer) const;

 private:
  struct Trunk {
    std::int64_t begin, end;
    std::int64_t kept_begin, kept_end;  // in layers with a window
    std::int64_t expected;
    std::vector<std::int64_t> arrived;  // per layer
    States states;
  };

  // Rows of one kind, and their gradients.
  struct Rows {
    at::Tensor values, gradients;
  };
  struct LayerRows {
    std::vector<Rows> kinds;  // [P, W]
    std::vector<std::int64_t> heads;
    std::vector<std::size_t> readers;         // later layers that read these rows
    std::int64_t first_state = 0, state = 0;  // of the numbers of all states: the first one of this layer, and how many
  };

  void take_layers(const ModelShape& shape, const BufferSizes& sizes, bool with_gradients, at::ScalarType dtype,
                   Arena& arena);
  void take_room(const BlockShape& block, bool with_gradients, at::ScalarType dtype, Arena& arena);
  State state_of(std::int64_t layer, std::size_t trunks) const;  // state of trunk number `trunks`, counted from 1
  Rows slice(std::int64_t layer, std::size_t kind, std::int64_t begin, std::int64_t end) const;
  Layer heads_of(std::int64_t layer, std::int64_t begin, std::int64_t end) const;
  Latents latents_of(std::int64_t layer, std::int64_t begin, std::int64_t end) const;
  const Trunk& trunk_above(std::int64_t rows) const;  // the one that ends at path row `rows`
  void zero_gradients(std::int64_t layer, std::int64_t begin, std::int64_t end);

  Device& device_;
  std::int64_t capacity_, window_capacity_, rows_ = 0;
  std::size_t first_layer_;              // of those with a backward: layers before it get no contributions
  std::int64_t window_rows_ = 0;         // W where layers with a window keep their last rows only; 0: all keep all
  std::vector<std::int64_t> window_of_;  // W of those layers, 0 of others
  std::vector<LayerRows> layers_;
  bool carries_latents_;
  Layer room_;  // of keys and values, for all layers of a path of latents
  LatentBlock latent_block_;
  std::int64_t room_layer_ = -1, room_rows_ = 0;
  std::vector<Trunk> trunks_;
  std::optional<PathWindow> window_;  // empty: all layers stay in memory
};

}  // namespace espalier
