// Keys and values of the open trunks, end to end, and the gradients that everything below adds to them.
//
// Shapes: P rows of the open trunks, J key/value heads, D head size, Dv that of values. A stack: a trunk's rows are
// pushed when its forward begins and popped after its backward. Gradients are kept in float32 (float64 in float64
// runs), so that any number of waves adds up without loss (mathematics, section 2). Every trunk knows how many
// contributions the plan promises; reading a trunk's gradient before the last one, or adding after, is an error, not a
// wrong number.
//
// Layers that are not in use may sleep: who reads or writes a layer says so before, in the order of a pass. Where ranks
// of cp divide them (saved/divided_path.h) they do so together, also one without rows of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "espalier/device/arena.h"
#include "espalier/model/path_window.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

class KvPath {
 public:
  struct Layer {
    at::Tensor k, v;            // [P, J, D], [P, J, Dv]
    at::Tensor grad_k, grad_v;  // of the same shapes, accumulator dtype; undefined in forward-only passes
  };

  // Takes `capacity` rows for every layer from the arena. With a keeper all layers but the first `layers_awake` sleep
  // while they are not in use; it must outlive the object.
  KvPath(const ModelShape& shape, std::int64_t capacity, at::ScalarType dtype, bool with_gradients, Arena& arena,
         PathKeeper* keeper = nullptr, std::int64_t layers_awake = 0);

  // The state [N] that a trunk leaves in one recurrent layer, and the sum of its gradients; undefined: 0, none.
  struct State {
    at::Tensor state_N, grad_state_N;
  };
  // The same of all such layers, in order.
  struct States {
    at::Tensor states_LN, grad_states_LN;
  };

  std::int64_t rows() const { return rows_; }
  // Opens `rows` more rows for a trunk below which `contributions` sets of rows will add gradients. Zeroes gradients.
  // The states are the caller's and stay until the trunk is popped.
  void push(std::int64_t rows, std::int64_t contributions, const States& states = {});
  void pop();

  // A set of rows runs a layer: forwards from the first to the last, or, `rows_above` being those of the path that
  // it sees, backwards. The layer can be read and written until the next one begins, or the backward ends.
  void begin_forward(std::int64_t layer);
  void begin_backward(std::int64_t layer, std::int64_t rows_above);
  void end_backward(std::int64_t layer);
  bool sleeps() const { return window_.has_value(); }

  Layer path(std::int64_t layer, std::int64_t rows) const;  // the first `rows` rows
  Layer top(std::int64_t layer) const;                      // rows of the innermost trunk

  // Among the layers whose rows carry a state, the number of this one.
  std::int64_t number_of_state(std::int64_t layer) const { return state_.at(static_cast<std::size_t>(layer)); }
  // The state of the innermost trunk, or of the last of the trunks that make up the first `rows` rows.
  State state_of_top(std::int64_t layer) const { return state_of(layer, trunks_.size()); }
  State state_above(std::int64_t layer, std::int64_t rows) const;

  // A set of rows below `rows` path rows has added its part to `layer`.
  void count_contribution(std::int64_t layer, std::int64_t rows);
  // The innermost trunk's backward reads `layer`.
  void expect_complete(std::int64_t layer) const;

 private:
  struct Trunk {
    std::int64_t begin, end;
    std::int64_t expected;
    std::vector<std::int64_t> arrived;  // per layer
    States states;
  };

  State state_of(std::int64_t layer, std::size_t trunks) const;  // of the last of the first so many
  Layer slice(std::int64_t layer, std::int64_t begin, std::int64_t end) const;
  void zero_gradients(std::int64_t layer, std::int64_t begin, std::int64_t end);

  Device& device_;
  std::int64_t capacity_, rows_ = 0;
  std::vector<Layer> layers_;
  std::vector<std::int64_t> state_;  // number of a layer among those whose rows carry a state
  std::vector<Trunk> trunks_;
  std::optional<PathWindow> window_;  // none: no layer sleeps
};

}  // namespace espalier
