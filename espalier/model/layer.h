// One decoder block: forward, and its backward written by hand.
//
//   n = norm(x);  q = rot(qnorm(n Wq^T)), k = rot(knorm(n Wk^T)), v = n Wv^T
//   y = x + attention(q, k, v, source) Wo^T;  z = y + mlp(norm(y))  (mlp.h: dense or experts)
// Each half may have a norm before it, after it, or both (branch.h). In latent attention q, k and v are computed from
// latents (latent.h), and all keys share a rotated row (ops/latent.h).
//
// Shapes: T rows, R rows that continue past the keys and values (all, or in a narrow last block those with an output),
// M width, H query heads, J key/value heads, D head size, F inner width, E experts, k of them a row.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/layer_context.h"
#include "espalier/program/item_state.h"

namespace espalier {

// Take the buffers of a block's saved members from the arena: of its first half, and of its second half.
void take_attention_saved(const LayerContext& context, LayerSaved& saved);
void take_mlp_saved(const LayerContext& context, LayerSaved& saved);

// Fills `saved` and overwrites stream_out [R, M]. If stream_out is undefined, it stops after gate_up (recomputation).
// Keys and values are written to the source if it keeps them. stream_out may be stream_mid.
void layer_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);

// Takes buffers for the members that `state` recomputes, and fills them from the members that were saved.
void layer_forward_again(const LayerContext& context, LayerSaved& saved, ItemState state);

// grad_stream_RM holds dL/dz on entry and is overwritten. Overwrites grad_in_TM with dL/dx; it is grad_stream itself if
// all rows continue. Adds to `grads`, and to the gradients of the attended keys and values. Consumes `saved`.
void add_layer_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads);

}  // namespace espalier
