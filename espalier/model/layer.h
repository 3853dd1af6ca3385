// One decoder block: forward, and its backward written by hand.
//
//   n = norm(x);  q = rot(qnorm(n Wq^T)), k = rot(knorm(n Wk^T)), v = n Wv^T
//   y = x + attention(q, k, v, source) Wo^T;  z = y + mlp(norm(y))  (mlp.h: dense or experts)
// Norms may stand before or behind each half, or both (branch.h). In latent attention q, k and v come out of latents
// (latent.h), and keys share a row (ops/latent.h).
//
// Shapes: T rows, R rows that continue past the keys and values (all, or in a narrow last block those with an output),
// M width, H query heads, J key/value heads, D head size, F inner width, E experts, k of them a row.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/layer_context.h"
#include "espalier/program/item_state.h"

namespace espalier {

// Takes the members of the first half of a block from the arena; of the second.
void take_attention_saved(const LayerContext& context, LayerSaved& saved);
void take_mlp_saved(const LayerContext& context, LayerSaved& saved);

// Fills `saved` and overwrites stream_out [R, M]; where stream_out is undefined it stops after gate_up (recomputation).
// Keys and values that the source keeps are written there. stream_out may be stream_mid.
void layer_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);

// Takes and fills what `state` says is made again, from what is there.
void layer_forward_again(const LayerContext& context, LayerSaved& saved, ItemState state);

// grad_stream_RM holds dL/dz on entry and is overwritten. Overwrites grad_in_TM with dL/dx; it is grad_stream itself
// where all rows continue. Adds to `grads`, and to the gradients of what the rows attended to. Consumes `saved`.
void add_layer_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads);

}  // namespace espalier
