// A layer's mixer at work: what the block asks of every kind (mixers/<kind>/layer.cpp).
//
// Shapes: T rows, R rows that continue, M width, K width of what the mixer's last product reads (Mixer::mixed_width).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "espalier/model/layer_context.h"

namespace espalier {

// A forward holds its buffers while it lives.
class MixerForward {
 public:
  virtual ~MixerForward() = default;

  // From the layer's input up to what the last product reads; fills what the mixer saves. Called also if no row
  // continues: the rows leave keys and values, or states, all the same.
  virtual void mix() = 0;
  // The input of the last product, [R, K].
  virtual at::Tensor mixed() = 0;
};

// A backward holds its buffers while it lives. The functions are called in this order, the first three only if rows
// continue.
class MixerBackward {
 public:
  virtual ~MixerBackward() = default;

  // The gradient comes through the last product next.
  virtual void enter_output() = 0;
  // The input of the last product, [R, K], computed again.
  virtual at::Tensor mixed_again() = 0;
  // Room for the gradient of it, which the block fills.
  virtual at::Tensor grad_mixed() = 0;
  // Adds the gradients of the parameters and of what the rows read of others. Returns the gradient of the mixer's
  // input, [T, M], of this rank's part of the parameters.
  virtual at::Tensor add() = 0;
};

struct MixerLayer {
  // Takes the buffers of what the mixer saves.
  SavedBuffers (*take_saved)(const LayerContext& context);
  // The arguments must outlive the result.
  std::unique_ptr<MixerForward> (*forward)(const LayerContext& context, const LayerSaved& saved);
  std::unique_ptr<MixerBackward> (*backward)(const LayerContext& context, const LayerSaved& saved,
                                             const PartViews& grads);
  // FLOP/s of the rows' own operations (MixerFlops::row) on this CPU, forward and backward together, of heads as models
  // of the kind have them. Null: the kind has none.
  double (*flops_per_second)(at::ScalarType dtype) = nullptr;
};

const MixerLayer& mixer_layer(MixerKind kind);

}  // namespace espalier
