// One decoder block: forward, and its backward written by hand. It is the same for every mixer and every MLP:
//
//   y = x + mixer(norm(x)) Wo^T,  z = y + mlp(norm(y))          (model/mixer_layer.h, model/mlp.h)
//
// Each half may have a norm before it, after it, or both, and a factor (model/branch.h), and z may have one. Rows
// without an output may end in a last block behind the mixer: the block is narrow then.
//
// Shapes: T rows, R rows that continue past the mixer (all, or in a narrow last block those with an output), M width.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/layer_context.h"
#include "espalier/program/item_state.h"

namespace espalier {

// Take the buffers of a block's saved members from the arena: of its first half, and of its second half.
void take_mixer_saved(const LayerContext& context, LayerSaved& saved);
void take_mlp_saved(const LayerContext& context, LayerSaved& saved);

// Fills `saved` and overwrites stream_out [R, M]. If stream_out is undefined, it stops after gate_up (recomputation).
// The source gets the keys, values or states that it keeps for other rows. stream_out may be stream_mid.
void layer_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);

// Takes buffers for the members that `state` recomputes, and fills them from the members that were saved.
void layer_forward_again(const LayerContext& context, LayerSaved& saved, ItemState state);

// grad_stream_RM holds dL/dz on entry and is overwritten. Overwrites grad_in_TM with dL/dx; it is grad_stream itself if
// all rows continue. Adds to `grads`, and to the gradients of what the rows read of others. Consumes `saved`.
void add_layer_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads);

}  // namespace espalier
